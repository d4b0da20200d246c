"""Programs call methods that parts of plugins offer, on each rank, by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rank_executor import Plugin

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import InvalidRequest, PluginError, RequestFailed
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.hooks import hookimpl
from jackfield.core.protocols.parts import PartSetup, StepPart
from jackfield.core.registry import load_plugins
from jackfield.core.worker.parts.part import PartSite, PartStart, StartContext, WorkerPart

from helpers import make_checkpoint


class Extension(WorkerPart):
    """What a trainer would add to the workers."""

    name = "extension"
    methods = frozenset({"scale_norm", "shape_of", "fail"})

    def __init__(self, model: Any) -> None:
        self.model = model

    def scale_norm(self, factor: float) -> float:
        self.model.model.norm.weight.mul_(factor)
        return float(self.model.model.norm.weight.float().norm())

    def shape_of(self, *, name: str) -> list[int]:
        return list(self.model.get_parameter(name).shape)

    def fail(self) -> None:
        raise ValueError("on purpose")

    def secret(self) -> str:
        return "not offered"


class Start(PartStart):
    option = "parts"

    def __init__(self, start: StartContext) -> None:
        self.model = start.model

    def make(self, site: PartSite) -> Extension:
        return Extension(self.model)


class Part(StepPart):
    @classmethod
    def worker_part(cls, setup: PartSetup, start: StartContext) -> PartStart:
        return Start(start)


def plugins() -> Any:
    module = ModuleType(__name__)

    def register_parts(registry: Any) -> None:
        registry.add("extension", Part)

    module.register_parts = hookimpl(register_parts)  # type: ignore[attr-defined]
    module.jackfield_api = API_VERSION  # type: ignore[attr-defined]
    return load_plugins(extra=(module, Plugin()))


@pytest.mark.parametrize("size", [1, 2])
async def test_methods_of_parts_are_called_by_name(size: int, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, num_gpu_blocks_override=64, parts={"extension": {}},
        tensor_parallel_size=size, executor="inprocess" if size == 1 else "rank_threads",
    )  # fmt: skip
    prompt, params = list(range(3, 20)), SamplingParams(temperature=1.0, max_tokens=8, seed=3)
    async with AsyncEngine(config, plugins=plugins()) as engine:

        async def said() -> list[int]:
            async for output in engine.generate(prompt, params):
                last = output
            return list(last.outputs[0].token_ids)

        before = await said()
        [first] = await engine.collective_rpc("scale_norm", args=(5.0,))
        [second] = await engine.collective_rpc("extension.scale_norm", args=(0.2,))
        torch.testing.assert_close(first, 5 * second)
        assert await said() == before
        await engine.collective_rpc("scale_norm", args=(0.01,))
        assert await said() != before
        name = "model.norm.weight"
        assert await engine.collective_rpc("shape_of", kwargs={"name": name}) == [[64]]
        for method in ("secret", "__init__", "weights_changed", "other.fail", "", "drop"):
            with pytest.raises(InvalidRequest, match=r"no part offers .*extension\.scale_norm"):
                await engine.collective_rpc(method)
        with pytest.raises(PluginError, match="on purpose"):
            await engine.collective_rpc("fail")
        with pytest.raises((PluginError, RequestFailed), match="TypeError"):
            await engine.collective_rpc("scale_norm", args=(1, 2))
        await said()
