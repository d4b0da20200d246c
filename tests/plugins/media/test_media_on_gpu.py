"""Families with pictures on a GPU, with recorded steps, say what `transformers` says on a CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing_models import FAMILIES, picture, save
from test_media_families import CASES, Made, check, engine_of, run

from jackfield import SamplingParams
from jackfield.core.worker.graphs.encoder_graphs import EncoderGraphs
from jackfield.core.worker.parts.input_embeds import InputEmbeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration", "Lfm2VlForConditionalGeneration",
        "LlavaForConditionalGeneration", "PaliGemmaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
    ],
)  # fmt: skip
async def test_pictures_on_a_gpu(architecture: str, tmp_path: Path) -> None:
    """One after the other, then all at once: encoded together, in steps with others' tokens."""
    made = Made(tmp_path, save(architecture, tmp_path), "image")
    async with engine_of(made, device="cuda", block_size=16, max_num_batched_tokens=128) as engine:
        for case in CASES.values():
            check(made, case, await run(engine, made, case))
        await engine.reset_prefix_cache()
        outputs = await asyncio.gather(*(run(engine, made, case) for case in CASES.values()))
        for case, output in zip(CASES.values(), outputs, strict=True):
            check(made, case, output)


@pytest.mark.parametrize("architecture", FAMILIES)
async def test_graphs_encode_what_launches_do(architecture: str, tmp_path: Path) -> None:
    """Eight pictures of one size, one after the other, then all of them together; nothing that an
    encoder does refuses to be recorded."""
    made = Made(tmp_path, save(architecture, tmp_path), "image")
    options: Any = {"max_num_batched_tokens": 4096, "max_model_len": 4096, "block_size": 16}
    async with engine_of(made, device="cuda", num_gpu_blocks_override=1024, **options) as engine:
        worker: Any = engine.core.executor._worker  # type: ignore[attr-defined]
        part = worker.runner.parts.find(InputEmbeds)
        graphs: EncoderGraphs = part.graphs
        encode, items, kinds = graphs.encode, [], []

        def noting(own: Any, own_kinds: Any) -> Any:
            items.extend(own)
            kinds.extend(own_kinds)
            return encode(own, own_kinds)

        graphs.encode = noting  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=1, temperature=0)
        for seed in range(8):
            prompt: Any = {
                "prompt": f"{FAMILIES[architecture].written}?",
                "multi_modal_data": {"image": picture(seed, 48, 48)},
            }
            async for _ in engine.generate(prompt, params):
                pass
        assert graphs.num_recorded > 0 and not graphs._refused

        @torch.inference_mode()
        def compare() -> None:
            launched = [part._encoder.encode([item])[0] for item in items]
            assert graphs.record(kinds[0], 2) and not graphs._refused
            for replayed in (
                [encode([item], [kind])[0] for item, kind in zip(items, kinds, strict=True)],
                encode(items, kinds),
            ):
                for one, other in zip(replayed, launched, strict=True):
                    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)

        await engine.core.executor._thread.call(compare)  # type: ignore[attr-defined]
