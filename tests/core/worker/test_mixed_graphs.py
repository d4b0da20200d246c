"""Steps with prompts that are recorded and replayed give what launched steps give."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import MixedRecordingExecutor, RecordingExecutor

from jackfield import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.worker.graphs import mixed_graphs
from jackfield.core.worker.graphs.mixed_graphs import (
    MAX_TOKENS,
    decode_row_counts,
    token_counts,
)
from jackfield.core.worker.graphs.mixed_inputs import MixedKey

from helpers import VOCAB, interpreted, joining, make_checkpoint

pytest.importorskip("triton")


COUNT = 7
"""Requests: the interpreter is slow."""


class CountingExecutor(MixedRecordingExecutor):
    counts: dict[str, int] = {}

    def __init__(self, config: Any, model_config: Any, plugins: Any) -> None:
        super().__init__(config, model_config, plugins)
        self.counts.update(replayed=0, launched=0)

    async def start(self) -> Any:
        info = await super().start()
        graphs: Any = self._worker.runner.mixed.graphs  # type: ignore[union-attr]
        plain = graphs.launch

        def launch(*arguments: Any) -> bool:
            served = bool(plain(*arguments))
            self.counts["replayed" if served else "launched"] += 1
            return served

        graphs.launch = launch
        return info


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("recording", CountingExecutor)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Of many lengths and options, some with a beginning in common."""
    draw = random.Random(5)
    extras: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.8},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.7, "repetition_penalty": 1.3},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "logit_bias": {5: 3.0}},
    ]
    shared = [draw.randrange(3, VOCAB) for _ in range(12)]
    pairs = []
    for number in range(count):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 26))]
        if number % 3 == 0:
            prompt = shared + prompt
        params = SamplingParams(
            max_tokens=draw.randrange(2, 6), seed=number, ignore_eos=True, detokenize=False,
            **extras[number % len(extras)],
        )  # fmt: skip
        pairs.append((prompt, params))
    return pairs


async def answers(config: EngineConfig, plugins: Any, count: int) -> list[Any]:
    def answer(output: RequestOutput) -> Any:
        choice = output.outputs[0]
        tables = [*(choice.logprobs or []), *(output.prompt_logprobs or [])[1:]]
        scores = [[round(p.logprob, 3) for p in position.values()] for position in tables]
        return choice.token_ids, choice.finish_reason, scores

    async with AsyncEngine(config, plugins=plugins) as engine:
        outputs = await joining(engine, requests(count))
        assert engine.stats().kv_blocks_used == 0
        assert (engine.stats().kv_compactions > 1) is config.compresses_kv
    return list(map(answer, outputs))


@interpreted
@pytest.mark.parametrize(
    "compression",
    [
        {},
        pytest.param(
            {"kv_compression": "key_norm", "kv_compression_ratio": 0.4}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"kv_compression_levels": "4@4", "kv_compression_interval": 4}, marks=pytest.mark.slow
        ),
    ],
    ids=["whole", "compressed", "in levels"],
)
async def test_recorded_steps_with_prompts_equal_launched_ones(
    checkpoint: Path, compression: dict[str, Any]
) -> None:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    common: dict[str, Any] = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 64, "max_num_seqs": 5, "max_num_batched_tokens": 34, "block_size": 8,
        "operations": "torch", "attention_backend": "triton", "num_gpu_blocks_override": 60,
        **compression,
    }  # fmt: skip
    launched = await answers(EngineConfig(**common), plugins, COUNT)
    config = EngineConfig(**common, executor="recording")
    replayed = await answers(config, plugins, COUNT)
    counts = CountingExecutor.counts
    # In so many steps at least the requests come.
    assert counts["replayed"] >= 4 and not counts["launched"], counts
    # Products of padded rows may differ in the last place, by the machine: a near tie may differ.
    same = sum(a == b for a, b in zip(launched, replayed, strict=True))
    assert same >= len(launched) - 1


@pytest.mark.slow
@interpreted
async def test_many_prompts_of_a_few_tokens_are_replayed_together(checkpoint: Path) -> None:
    """More of them than the smallest graph of so many tokens has room for."""
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=40, max_num_seqs=8, max_num_batched_tokens=80, block_size=8,
        operations="torch", attention_backend="triton", num_gpu_blocks_override=60,
        executor="recording",
    )  # fmt: skip
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)

    async def run_one(engine: AsyncEngine, number: int) -> list[int]:
        async for out in engine.generate([5 + number] * (2 + number % 2), params):
            last = out
        return list(last.outputs[0].token_ids)

    async with AsyncEngine(config, plugins=plugins) as engine:
        together = await asyncio.gather(*(run_one(engine, n) for n in range(8)))
        counts = dict(CountingExecutor.counts)
        alone = [await run_one(engine, n) for n in (0, 5)]
    assert counts["replayed"] and not counts["launched"], counts
    assert [together[0], together[5]] == alone


def test_token_counts_end_with_the_most_of_a_step() -> None:
    assert token_counts(12) == [12]
    assert token_counts(70) == [16, 32, 64, 70]
    counts = token_counts(MAX_TOKENS)
    assert counts == sorted(set(counts)) and counts[-1] == MAX_TOKENS
    assert all(b - a <= max(32, a // 4) for a, b in itertools.pairwise(counts))
    assert decode_row_counts(5) == [0, 5]
    assert decode_row_counts(256) == [0, 16, 64, 256]


class FirstGraphsExecutor(RecordingExecutor):
    """As one whose server gets its first request at once, and is never idle."""

    graphs: Any = None

    async def start(self) -> Any:
        info = await super().start()
        graphs: Any = self._worker.runner.mixed.graphs  # type: ignore[union-attr]
        FirstGraphsExecutor.graphs = graphs

        @torch.inference_mode()
        def record() -> None:
            graphs._steps.clear()
            graphs.record(MixedKey(4, 64))

        assert self._thread is not None
        await self._thread.call(record)
        return info


@interpreted
@pytest.mark.parametrize("in_traffic", [True, False])
async def test_a_graph_that_steps_go_without_is_recorded_in_traffic(
    in_traffic: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once enough was lost: not at the first such step, and not by stages of a pipeline."""

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("recording", FirstGraphsExecutor)

    monkeypatch.setattr(mixed_graphs, "FREE_TOKENS", 1)
    monkeypatch.setattr(mixed_graphs, "token_counts", lambda most: [16, 64])
    plugins = load_plugins(extra=[Plugin()])
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=8,
        operations="torch", attention_backend="triton", num_gpu_blocks_override=40,
        executor="recording", enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    seen, late = [], []
    async with AsyncEngine(config, plugins=plugins) as engine:
        graphs = FirstGraphsExecutor.graphs
        assert graphs._in_traffic
        graphs._in_traffic = in_traffic
        for number in range(3):
            outputs = [out async for out in engine.generate([5 + number] * 12, params)]
            assert len(outputs[-1].outputs[0].token_ids) == 1
            seen.append(set(graphs._steps))
            late.append(engine.stats().late_preparations)
    if not in_traffic:
        assert seen[2] == {MixedKey(4, 64)}
        return
    # Each loses 48 tokens of padding, three steps of 16.
    assert seen[0] == {MixedKey(4, 64)}
    assert seen[1] == seen[2] == {MixedKey(4, 64), MixedKey(0, 16)}
    assert late[0] < late[1] == late[2]
