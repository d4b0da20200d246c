"""Families with pictures on a GPU, with recorded steps, say what `transformers` says on a CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from seeing_models import save
from test_media_families import CASES, Made, check, engine_of, run

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
