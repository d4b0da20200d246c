"""Every method's drafts, for any mix of requests: the tokens are those of an engine without drafts.

One engine without drafts answers for all methods that serve its model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import LLAMA, Random, write
from drafting import Asked, answers, knowing_plugins
from hypothesis import settings
from test_drafts_of_all_rows import (
    COMPRESSION,
    EMBEDDED,
    ENGINE,
    MODELS,
    SIZES,
    mixes,
    model_in,
    without_siblings,
)
from test_drafts_of_all_rows import options_of_search as search

from jackfield import AsyncEngine, EngineConfig

VOCAB, HIDDEN, HEADS, INNER = 1536, 192, 3, 24
Speculative = Callable[[Path], dict[str, Any]]


def eagle(folder: Path) -> dict[str, Any]:
    draw = Random(1)
    tensors = {"fc.weight": draw.matrix(HIDDEN, 2 * HIDDEN), **draw.layer("layers.0.", HIDDEN)}
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    config = {**LLAMA, **sizes, "architectures": ["EagleLlamaForCausalLM"]}
    return {"method": "eagle", "model": str(write(folder / "eagle", tensors, config))}


def medusa(folder: Path) -> dict[str, Any]:
    """Heads that say again what the model has just said."""
    draw = Random(6)
    tensors = {
        f"blocks.{h}.layers.0.weight": 0.01 * draw.matrix(HIDDEN, HIDDEN) for h in range(HEADS)
    }
    tensors |= {f"lm_heads.{h}.weight": draw.matrix(VOCAB, HIDDEN) for h in range(HEADS)}
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN,
        "num_heads": HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB,
    }  # fmt: skip
    return {"method": "medusa", "model": str(write(folder / "medusa", tensors, config))}


def mlp_speculator(folder: Path) -> dict[str, Any]:
    draw, tensors = Random(7), {}
    for h in range(HEADS):
        tensors |= {
            f"emb.{h}.weight": draw.matrix(VOCAB, INNER),
            f"head.{h}.weight": draw.matrix(VOCAB, INNER),
            f"ln.{h}.weight": draw.norm(INNER), f"ln.{h}.bias": draw.norm(INNER),
            f"proj.{h}.weight": draw.matrix(INNER, INNER if h else HIDDEN),
        }  # fmt: skip
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "emb_dim": HIDDEN, "inner_dim": INNER, "n_predict": HEADS, "vocab_size": VOCAB,
    }  # fmt: skip
    return {"method": "mlp_speculator", "model": str(write(folder / "mlp", tensors, config))}


METHODS: dict[str, Speculative] = {
    "ngram": lambda _: {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": lambda _: {"method": "suffix"},
    "draft_model": lambda _: {"method": "draft_model", "model": str(EMBEDDED)},
    "eagle": eagle,
    "eagle3": lambda _: {"method": "eagle3"},
    "medusa": medusa,
    "mlp_speculator": mlp_speculator,
}
MTP: dict[str, Speculative] = {"mtp": lambda _: {"method": "mtp"}}
CACHED = {name: METHODS[name] for name in ("draft_model", "eagle", "eagle3")}
"""Those whose layers share blocks with the served model's."""
COMPACTED: list[dict[str, Any]] = [
    {**COMPRESSION, "kv_compression": name} for name in ("snap_kv", "snap_kv_merge")
] + [{**COMPRESSION, "kv_compression_budget": None, "kv_compression": "key_norm",
      "kv_compression_levels": "8@16,4:0.5@24"}]  # fmt: skip
MIMO = {
    "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1,
    **SIZES,
}  # fmt: skip


class Engines:
    """One without drafts, and one of each method, on a loop of their own."""

    def __init__(self, folder: Path, methods: dict[str, Speculative], **options: Any) -> None:
        self.runner = asyncio.Runner()
        self.methods = {name: made(folder) for name, made in methods.items()}
        self.options = {**ENGINE, **options}
        self.plain = self.open(None)
        self.drafted = {name: self.open(own) for name, own in self.methods.items()}

    def open(self, own: dict[str, Any] | None) -> AsyncEngine:
        if own is not None:
            count = 1 if own["method"] == "mtp" else HEADS
            own = {"num_speculative_tokens": count, "adaptive_width": False, **own}
        config = EngineConfig(**self.options, speculative_config=own)
        engine = AsyncEngine(config, plugins=knowing_plugins())
        self.runner.run(engine.__aenter__())
        return engine

    def compare(self, asked: Asked) -> None:
        if "kv_compression" in self.options:
            asked = without_siblings(asked)
        plain = self.runner.run(answers(self.plain, asked))
        for name, engine in self.drafted.items():
            drafted = self.runner.run(answers(engine, asked))
            for (_, params), one, other in zip(asked, plain, drafted, strict=True):
                assert other == one, f"{name}: {params}\n{other}\n{one}"

    def check(self, count: int) -> None:
        """Compare so many mixes: each method has drafts, which are verified."""

        @settings(max_examples=count, **search)
        @mixes
        def check(asked: Asked) -> None:
            self.compare(asked)

        try:
            check()
            for name, engine in self.drafted.items():
                assert engine.stats().spec_decode_num_draft_tokens > 0, name
        finally:
            for engine in (self.plain, *self.drafted.values()):
                self.runner.run(engine.__aexit__(None, None, None))
            self.runner.close()


def mimo(folder: Path) -> dict[str, Any]:
    MODELS["mimo"] = MIMO
    return {"model": str(model_in(folder / "mimo", "mimo")), "load_format": "dummy"}


def test_mixes_give_the_tokens_of_an_engine_without_drafts(tmp_path: Path) -> None:
    Engines(tmp_path, METHODS).check(2)
    Engines(tmp_path, MTP, **mimo(tmp_path)).check(2)
    (tmp_path / "compacted").mkdir()
    Engines(tmp_path / "compacted", CACHED, **COMPACTED[0]).check(2)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_ten_thousand_mixes_of_each_method(tmp_path: Path) -> None:
    """A night's work: a fifth of a second of a processor for a mix and a method."""
    torch.set_num_threads(1)
    Engines(tmp_path, MTP, **mimo(tmp_path)).check(10_000)
    Engines(tmp_path, METHODS).check(10_000)
    for number, options in enumerate(COMPACTED):
        (folder := tmp_path / f"compacted{number}").mkdir()
        Engines(folder, CACHED, **options).check(3_000)
