"""The step that a start measures takes as much memory as any later one, whatever its lengths.

Kernels do not run here: the interpreter would copy their arguments.
"""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import pytest
import seeing_models
import torch
import transformers
from test_latent_graphs import INDEXED, SIZES, Plugin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.registry import Provenance, load_plugins
from jackfield.plugins.operations import indexing

from helpers import interpreted

pytest.importorskip("triton")

BUDGET, LONGEST = 24, 200
CHOSEN = {**INDEXED, "index_topk": 12}
"""More than the tokens of a row where the budget is spread over as many as possible."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were allocated while it was on, and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs or {}))
            if isinstance(each, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _freed(self, place: int, nbytes: int) -> None:
        self._seen.discard(place)
        self.live -= nbytes


@pytest.fixture
def idle_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they would have written is zeros."""
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(GridExecutor, "__call__", lambda *arguments, **options: None)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)


@interpreted
@pytest.mark.usefixtures("idle_kernels")
@pytest.mark.parametrize(
    ("family", "sizes", "max_num_seqs"),
    [("GlmMoeDsa", CHOSEN, 3), ("DeepseekV2", SIZES, 3), ("DeepseekV2", SIZES, 1)],
    ids=["chosen tokens", "cached latents", "one row"],
)
async def test_no_step_takes_more_memory_than_the_measured_one(
    family: str,
    sizes: dict[str, Any],
    max_num_seqs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of prompts that end beyond what an indexer chooses, and decode rows after them."""
    monkeypatch.setattr(indexing, "SCORES", 3 * 208)
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(
        **{**sizes, "max_position_embeddings": LONGEST}
    )
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "memory"))
    options = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=LONGEST, max_num_seqs=max_num_seqs, max_num_batched_tokens=BUDGET,
        block_size=8, operations="latent_kernels", attention_backend="triton", enforce_eager=True,
    )  # fmt: skip
    counter = LiveBytes()
    taken: list[tuple[int, int, int]] = []
    """Tokens of a forward pass, its longest row, and the bytes that it took."""
    async with AsyncEngine(options, plugins=plugins) as engine:
        executor: Any = engine.core.executor
        worker = executor._worker
        forward = worker.runner.forward

        def counted(inputs: Any) -> torch.Tensor:
            counter.peak = counter.live
            with counter:
                hidden: torch.Tensor = forward(inputs)
            layout = inputs.layout
            taken.append((layout.num_tokens, layout.max_seq_len, counter.peak))
            return hidden

        worker.runner.forward = counted
        await executor._thread.call(torch.inference_mode()(worker._started.warmup.run_largest))
        (measured,) = taken
        taken.clear()
        prompts = [[3 + n % 50 for n in range(length)] for length in (LONGEST - 5, 90, 24)]

        async def generate(prompt: list[int]) -> None:
            params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
            async for _ in engine.generate(prompt, params):
                pass

        await asyncio.gather(*map(generate, prompts))
    assert measured[:2] == (BUDGET, LONGEST)
    assert any(tokens == BUDGET and longest > 180 for tokens, longest, _ in taken)
    assert max(nbytes for _, _, nbytes in taken) <= measured[2], (measured, taken)


@pytest.mark.parametrize("family", ["InternVL", "Qwen2VL"])
async def test_no_pictures_of_a_plan_take_more_memory_than_the_measured_ones(
    family: str, tmp_path: Path
) -> None:
    """Of any sizes, as many as a plan encodes."""
    seeing_models.save(f"{family}ForConditionalGeneration", tmp_path)
    options = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", max_model_len=LONGEST,
        max_num_batched_tokens=2 * BUDGET, num_gpu_blocks_override=200,
    )  # fmt: skip
    counter = LiveBytes()
    taken: list[tuple[int, int]] = []
    """Items that were encoded together, and the bytes that it took."""
    async with AsyncEngine(options) as engine:
        executor: Any = engine.core.executor
        worker = executor._worker
        encoder = worker.runner.model.media
        encode = encoder.encode

        def counted(items: Any) -> Any:
            kept = counter.peak = counter.live
            with counter:
                outputs = encode(items)
            taken.append((len(items), counter.peak - kept))
            return outputs

        encoder.encode = counted
        largest = torch.inference_mode()(worker._started.warmup.run_largest_parts)
        kept = await executor._thread.call(largest)
        measured = max(nbytes for _, nbytes in taken)
        taken.clear()
        sizes = [(40, 32), (700, 500), (300, 900), (512, 512), (90, 17), (31, 33)] * 2
        written = seeing_models.FAMILIES[f"{family}ForConditionalGeneration"].written

        async def see(seed: int, size: tuple[int, int]) -> None:
            images = {"image": seeing_models.picture(seed, *size)}
            prompt: Any = {"prompt": f"{written}?", "multi_modal_data": images}
            async for _ in engine.generate(prompt, SamplingParams(max_tokens=1)):
                pass

        await asyncio.gather(*(see(seed, size) for seed, size in enumerate(sizes)))
    assert kept >= 2 * BUDGET * encoder.hf.config.text_config.hidden_size * 4
    assert any(count > 1 for count, _ in taken)
    # Outputs of other sizes than these are kept beside.
    # Outputs of those of other sizes are kept beside.
    assert max(nbytes for _, nbytes in taken) <= measured + kept, (measured, taken)
