"""Engines with speculators that have weights, and what they propose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rank_executor import Plugin as Ranks

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.outputs import EngineStats
from jackfield.core.protocols import Drafts, KnownTokens
from jackfield.core.registry import Provenance, load_plugins

from helpers import VOCAB, at_once

LENGTH = 96
Reference = Callable[[list[int], int], list[int] | None]
"""(known tokens, number of drafts) → drafts of a greedy row, computed independently, or None"""


def config_of(folder: Path, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": LENGTH,
        "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 4, "operations": "torch",
        "num_gpu_blocks_override": 200, **options,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **settings)


def greedy(**more: Any) -> SamplingParams:
    options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**options, **more})


def requests(
    count: int = 6, seed: int = 0, max_tokens: int = 14
) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled ones; prompts of many lengths, some longer than a step, some with a
    beginning in common."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, VOCAB) for _ in range(9)]
    made = []
    for number in range(count):
        part = [draw.randrange(3, VOCAB) for _ in range(1 + draw.randrange(12) * (number % 4))]
        prompt = (shared if number % 3 == 0 else []) + part
        sampled = {"temperature": 0.9, "seed": number} if number % 3 == 1 else {}
        made.append((prompt, greedy(max_tokens=max_tokens, **sampled)))
    return made


class HiddenStates:
    """Of the texts that a causal model reads: computed once for all that begin alike, if the
    longest comes first."""

    def __init__(self, compute: Callable[[list[int]], Iterable[torch.Tensor]]) -> None:
        """compute: tokens → any number of [tokens, size]"""
        self._compute = compute
        self._tokens: list[int] = []
        self._states: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def of(self, tokens: list[int]) -> tuple[torch.Tensor, ...]:
        if not self._tokens or self._tokens[: len(tokens)] != tokens:
            self._tokens, self._states = tokens, tuple(self._compute(tokens))
        return tuple(states[: len(tokens)] for states in self._states)


class Proposals:
    """A plugin whose speculator "captured" is one of the box, and notes what it proposes."""

    jackfield_api = 3

    def __init__(self, method: str) -> None:
        self.plugins = load_plugins()
        box = self.plugins["speculator"].load(method)
        noted = self.noted = []

        class Captured(box):  # type: ignore[misc, valid-type]
            def propose(self, tokens: KnownTokens) -> Drafts:
                drafts = super().propose(tokens)
                rows = zip(tokens.slots.tolist(), tokens.lengths.tolist(), strict=True)
                known = [tokens.history[slot, :length].tolist() for slot, length in rows]
                noted.extend(zip(known, drafts.token_ids.tolist(), strict=True))
                return drafts

            @classmethod
            def recognizes(cls, config: Any) -> int:
                return 0

        self.captured = Captured
        self.plugins.add_plugin(self, Provenance("captured", "1", "speculators"))

    @hookimpl
    def register_speculators(self, registry: Any) -> None:
        registry.add("captured", self.captured)


async def serve(
    config: EngineConfig, asked: Sequence[tuple[list[int], SamplingParams]], plugins: Any = None
) -> tuple[list[list[int]], EngineStats]:
    """The tokens of each request, and what the engine counted."""

    async def run_one(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
        async for out in engine.generate(prompt, params):
            last = out
        assert last.error is None, last.error
        return list(last.outputs[0].token_ids)

    async with AsyncEngine(config, plugins=plugins) as engine:
        outputs = await at_once(engine, *(run_one(engine, *each) for each in asked))
        stats = engine.stats()
        await asyncio.sleep(0)
        engine.core.check_idle()  # type: ignore[attr-defined]
        assert stats.kv_blocks_used == 0
    return list(outputs), stats


_known: dict[str, list[list[int]]] = {}


async def without_drafts(
    config: EngineConfig, asked: Sequence[tuple[list[int], SamplingParams]]
) -> list[list[int]]:
    """The tokens of each request, served once however often they are asked for."""
    key = f"{config} {asked}"
    if key not in _known:
        _known[key], _ = await serve(config, asked)
    return _known[key]


async def check_drafts(
    folder: Path,
    speculative: dict[str, Any],
    reference: Reference | None = None,
    *,
    asked: Sequence[tuple[list[int], SamplingParams]] = (),
    stages: int = 1,
    **options: Any,
) -> EngineStats:
    """Serve without drafts and with them, then in so many stages: the same tokens, from the drafts
    of the reference."""
    asked = asked or requests()
    plain = await without_drafts(config_of(folder, **options), asked)
    proposals = Proposals(speculative["method"])
    # The same drafts however long steps take.
    speculative = {"adaptive_width": False, **speculative, "method": "captured"}
    if stages > 1:
        options |= {"executor": "rank_threads", "pipeline_parallel_size": stages}
        proposals.plugins.add_plugin(Ranks(), Provenance("tests", "0", "rank_threads"))
    config = config_of(folder, speculative_config=speculative, **options)
    drafted, stats = await serve(config, asked, proposals.plugins)
    assert drafted == plain
    compared = 0
    # The longest of those that begin alike comes first (`HiddenStates`).
    for known, drafts in sorted(proposals.noted, key=lambda noted: noted[0], reverse=True):
        served = (p + t for (p, params), t in zip(asked, plain, strict=True)
                  if params.temperature == 0.0)  # fmt: skip
        # Of the others, and of rows that are computed once more, the reference knows nothing.
        if reference is not None and any(whole[: len(known)] == known for whole in served):
            expected = reference(known, len(drafts))
            assert expected is None or drafts == expected, known
            compared += expected is not None
    assert reference is None or compared > len(asked)
    return stats
