"""Classifiers of whole prompts and of each token that are made of a family's class that generates:
the logits of `transformers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import test_model_kit
import torch
import transformers

from jackfield import AsyncEngine, EngineConfig, PoolingParams
from jackfield.plugins.conformance.models import ModelKit
from jackfield.plugins.conformance.paged_model import LONGEST, example_prompts

KITS = {
    kit.name: kit
    for kit in vars(test_model_kit).values()
    if isinstance(kit, type) and issubclass(kit, ModelKit) and hasattr(kit, "name")
}
"""Architecture that generates → the kit with its tiny configuration."""
SUFFIXES = ("ForSequenceClassification", "ForTokenClassification")
QUICK = ("GPT2", "Mixtral", "Phi", "Llama")
"""Families of each run; the others are tested nightly."""


def classifiers() -> list[Any]:
    found = []
    for name in KITS:
        family = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        for suffix in SUFFIXES:
            if hasattr(transformers, family + suffix) and family != "Gemma3":  # With a picture's.
                marks = () if family in QUICK else (pytest.mark.slow,)
                found.append(pytest.param(name, family + suffix, marks=marks, id=family + suffix))
    return found


def save(folder: Path, name: str, architecture: str, **changes: Any) -> Any:
    """A random classifier with the configuration of a family's kit."""
    kit = type("Kit", (KITS[name],), {"name": architecture})
    kit.reference = getattr(transformers, architecture)
    kit.config = {**KITS[name].config, "num_labels": 3, **changes}
    model = kit.make_reference()
    model.save_pretrained(folder)
    return model


def pooled(folder: Path, prompts: Sequence[list[int]], **params: Any) -> list[torch.Tensor]:
    config = EngineConfig(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=LONGEST,
        max_num_seqs=8, num_gpu_blocks_override=256, max_num_batched_tokens=24, device="cpu",
    )  # fmt: skip

    async def run() -> list[torch.Tensor]:
        async with AsyncEngine(config) as engine:
            outputs = await asyncio.gather(
                *(engine.encode(prompt, PoolingParams(**params)) for prompt in prompts)
            )
            return [torch.from_numpy(output.outputs.data.copy()) for output in outputs]

    return asyncio.run(run())


@pytest.mark.parametrize(("name", "architecture"), classifiers())
def test_logits_are_those_of_transformers(name: str, architecture: str, tmp_path: Path) -> None:
    model = save(tmp_path, name, architecture)
    prompts = example_prompts()
    got = pooled(tmp_path, prompts, activation=False)
    for prompt, logits in zip(prompts, got, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([prompt])).logits[0].float()
        assert logits.shape == want.shape
        assert float((logits - want).abs().max()) <= 1e-3 * max(1.0, float(want.abs().max()))
