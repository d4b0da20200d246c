"""Steps of texts alone cost a multimodal checkpoint what they cost its text part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import seeing_models
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield import AsyncEngine, EngineConfig, SamplingParams


class Launches(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


async def launches_of(engine: AsyncEngine) -> list[list[str]]:
    """Return the operations of each step of a text's prompt, in two chunks, and output."""
    runner: Any = engine.core.executor._worker.runner  # type: ignore[attr-defined]
    launch, steps = runner.launch, []

    def counted(*args: Any) -> Any:
        mode = Launches()
        with mode:
            step = launch(*args)
        steps.append(mode.names)
        return step

    runner.launch = counted
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    async for _ in engine.generate("Only words, in two chunks.", params):
        pass
    runner.launch = launch
    return steps


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen3VL", "Gemma3"])
async def test_text_alone_launches_what_its_text_part_launches(family: str, tmp_path: Path) -> None:
    """Also after pictures, whose requests have ended."""
    name = f"{family}ForConditionalGeneration"
    seeing_models.save(name, tmp_path)
    given: dict[str, Any] = {
        "model": str(tmp_path), "device": "cpu", "dtype": "float32", "max_num_batched_tokens": 20,
        "num_gpu_blocks_override": 200, "enable_prefix_caching": False, "max_model_len": 200,
    }  # fmt: skip
    async with AsyncEngine(EngineConfig(**given, language_model_only=True)) as engine:
        await launches_of(engine)  # Memory that stays is allocated once.
        expected = await launches_of(engine)
    assert len(expected) >= 4 and min(map(len, expected)) > 20
    async with AsyncEngine(EngineConfig(**given)) as engine:
        await launches_of(engine)
        assert await launches_of(engine) == expected
        written = seeing_models.FAMILIES[name].written
        prompt: Any = {
            "prompt": f"See {written}!", "multi_modal_data": {"image": seeing_models.picture(1)},
        }  # fmt: skip
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=2)):
            pass
        # The first of them gives the picture's slot back.
        assert (await launches_of(engine))[1:] == expected[1:]
