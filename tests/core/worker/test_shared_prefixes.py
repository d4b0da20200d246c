"""What rows of a step share: as the host follows it, and in steps that read it once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replaying import RecordingExecutor

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.context import BatchLayout
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.step import Ping, SlotStart, StepPlan, TableWrite
from jackfield.core.worker.graphs import decode_graphs
from jackfield.core.worker.graphs.decode_graphs import DecodeKey
from jackfield.core.worker.graphs.endings import Ending, row_counts, shared_row_counts
from jackfield.core.worker.shared_prefixes import SharedPrefixes
from jackfield.core.worker.start import step_graphs
from jackfield.plugins.attention import triton
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.attention.triton_call import LayerCall

from helpers import VOCAB, interpreted, make_checkpoint

BLOCK = 8


def plan_of(
    *, starts: Sequence[int] = (), writes: Sequence[tuple[int, int, int, list[int]]] = ()
) -> StepPlan:
    """A plan that starts slots, and writes (slot, group, column, blocks)."""
    return StepPlan(
        step=0, slots=(), num_tokens=(), samples=(),
        starts=tuple(
            SlotStart(
                slot=slot, request_id="", token_ids=(), num_prompt_tokens=1, seed=0,
                num_computed_tokens=0, params=SamplingParams(),
            )
            for slot in starts
        ),
        table_writes=tuple(
            TableWrite(slot, group, column, tuple(blocks)) for slot, group, column, blocks in writes
        ),
    )  # fmt: skip


def long() -> np.ndarray:
    """Lengths of slots that have more tokens than they share"""
    return np.full(6, 600 * BLOCK, dtype=np.int32)


def make_prefixes(groups=(0,), least=1) -> SharedPrefixes:
    return SharedPrefixes(
        num_slots=6, max_model_len=600 * BLOCK, block_size=BLOCK, groups=groups,
        least_tokens=lambda rows: least,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [(0,), (0, 2)])
def test_shared_tokens_are_those_of_leading_equal_blocks(groups: tuple[int, ...]) -> None:
    """Slots that start alike, in turns of what they have in common, in parts and block by block,
    against a comparison of whole tables."""
    draw = random.Random(len(groups))
    prefixes = make_prefixes(groups)
    tables: dict[tuple[int, int], list[int]] = {}
    common = {group: [draw.randrange(1, 10**6) for _ in range(550)] for group in range(3)}
    lengths = [0, 1, 3, 255, 256, 257, 530]
    shared_at_all = 0
    for turn in range(300):
        if turn % 60 == 59:  # Other requests than before.
            common = {group: [draw.randrange(1, 10**6) for _ in range(550)] for group in range(3)}
        slot, writes, starts = draw.randrange(6), [], []
        if (slot, 0) not in tables or draw.random() < 0.3:
            starts = [slot]
            for group in range(3):
                tables[slot, group] = []
            begin = draw.choice(lengths)
        else:
            begin = 0
        for group in range(3):
            table = tables[slot, group]
            more = common[group][: begin if group else max(0, begin - draw.randrange(2))]
            more = more + [draw.randrange(1, 10**6) for _ in range(draw.choice([1, 1, 1, 9]))]
            for part in (more[:2], more[2:]):
                if part:
                    writes.append((slot, group, len(table), part))
                    table += part
        prefixes.follow(plan_of(starts=starts, writes=writes))
        slots = tuple(sorted({slot for slot, _ in tables}))
        slots = tuple(draw.sample(slots, draw.randrange(1, len(slots) + 1)))
        for _ in range(2):
            blocks = []
            for group in groups:
                rows = [tables[slot, group] for slot in slots]
                columns = [set(column) for column in zip(*rows, strict=False)]
                blocks.append(next((n for n, c in enumerate(columns) if len(c) > 1), len(columns)))
            expected = min(blocks) * BLOCK if len(slots) > 1 else 0
            shared_at_all += expected > BLOCK
            assert prefixes.tokens(slots, long) == expected
    assert shared_at_all > 50


def test_tokens_of_a_slot_that_another_request_takes_are_forgotten() -> None:
    prefixes = make_prefixes()
    prefixes.follow(plan_of(starts=[0, 1], writes=[(0, 0, 0, [5, 6, 7]), (1, 0, 0, [5, 6, 8])]))
    assert prefixes.tokens((0, 1), long) == 2 * BLOCK
    prefixes.follow(plan_of(starts=[1], writes=[(1, 0, 0, [5])]))
    assert prefixes.tokens((0, 1), long) == BLOCK
    # A table of other layers says nothing of these.
    prefixes.follow(plan_of(writes=[(1, 1, 1, [6, 7])]))
    assert prefixes.tokens((0, 1), long) == BLOCK


def test_no_slot_shares_its_last_token() -> None:
    """One whose prompt's last chunk fills a block, which another slot has from the same plan on:
    where splits read the rest of a row, the first would have none."""
    prefixes = make_prefixes()
    prefixes.follow(plan_of(starts=[0, 1], writes=[(0, 0, 0, [5, 6, 7]), (1, 0, 0, [5, 6, 7, 8])]))
    for length, shared in ((3 * BLOCK, 2), (3 * BLOCK + 1, 3)):
        lengths = [np.asarray([length, 3 * BLOCK + 1], dtype=np.int32)]
        prefixes.follow(plan_of(starts=[2]))
        for _ in range(2):  # Lengths are not read again.
            assert prefixes.tokens((0, 1), lengths.pop) == shared * BLOCK


def test_what_does_not_pay_is_not_shared() -> None:
    writes = [(0, 0, 0, [5, 6, 7]), (1, 0, 0, [5, 6, 8])]
    for least, tokens in ((2 * BLOCK, 2 * BLOCK), (2 * BLOCK + 1, 0), (None, 0)):
        prefixes = make_prefixes(least=least)
        prefixes.follow(plan_of(starts=[0, 1], writes=writes))
        assert prefixes.tokens((0, 1), long) == tokens
        assert prefixes.tokens((0,), long) == 0


def test_steps_that_share_are_recorded_for_fewer_rows() -> None:
    for most in (1, 6, 24, 200, 256, 300):
        counts = shared_row_counts(most)
        assert set(counts) <= set(row_counts(most)) and counts[-1] == most
        assert all(n >= 8 for n in counts[:-1])


class SharingAttention(TorchAttention):
    """Checks what layouts say that rows share, which this backend does not need to know."""

    graph_safe = True
    steps: list[tuple[int, int]] = []
    """Rows and shared tokens of each step that shares some."""

    def least_shared_prefix(self, num_rows: int) -> int | None:
        return 2 * BLOCK

    def build_metadata(self, layout: BatchLayout) -> Any:
        shared = 0 if layout.shared_prefix is None else int(layout.shared_prefix)
        if shared and not layout.group:  # Of those that see all tokens there is one.
            longer = np.flatnonzero(np.diff(layout.query_start_cpu) != 1)
            rows = int(longer[0]) if longer.size else layout.num_rows
            # Padding has one token, in the null block.
            tables = layout.block_table[:rows][layout.block_table[:rows, 0] != 0]
            assert len(tables) > 1 and shared % BLOCK == 0
            assert (tables[:, : shared // BLOCK] == tables[0, : shared // BLOCK]).all()
            lengths = layout.seq_lens[:rows][layout.block_table[:rows, 0] != 0]
            assert shared < int(lengths.min())
            self.steps.append((len(tables), shared))
        return super().build_metadata(layout)

    def forward(self, spec: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any):
        metadata.chunks.clear()
        return super().forward(spec, query, key, value, kv_cache, metadata)


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("recording", RecordingExecutor)

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("sharing", SharingAttention)


async def answers(
    config: EngineConfig, plugins: Any, common: int, lengths: tuple[int, ...]
) -> tuple[list[list[int]], int]:
    """Tokens and preemptions of requests that begin with the same `common` tokens: the first alone,
    two beside it, one when a row has left."""
    draw = random.Random(5)
    prefix = [draw.randrange(3, VOCAB) for _ in range(common)]
    prompts = [prefix + [draw.randrange(3, VOCAB) for _ in range(own)] for own in (5, 1, 11, 3)]
    async with AsyncEngine(config, plugins=plugins) as engine:
        tasks: list[asyncio.Task[list[int]]] = []

        async def generate(number: int) -> list[int]:
            params = SamplingParams(
                max_tokens=lengths[number], temperature=0.0, ignore_eos=True, detokenize=False
            )
            async for output in engine.generate(prompts[number], params):
                count = len(output.outputs[0].token_ids)
                for at, after, others in ((0, 2, (1, 2)), (1, lengths[1], (3,))):
                    if number == at and count >= after and len(tasks) == (2 if at else 0):
                        tasks.extend(asyncio.create_task(generate(other)) for other in others)
            return list(output.outputs[0].token_ids)

        tokens = [await generate(0), *[await task for task in tasks]]
        return tokens, engine.stats().num_preemptions


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(
    ("model", "recorded", "num_blocks"),
    [("qwen3", False, 60), ("qwen3", True, 60), ("qwen3", True, 14), ("gemma3", False, 120)],
    ids=["launched", "recorded", "preempted", "windows"],
)
async def test_rows_that_come_and_go_share_what_their_prompts_have_in_common(
    model: str, recorded: bool, num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(model, tmp_path)
    monkeypatch.setattr(decode_graphs, "SHARED_COST", 4.0)  # Recorded at once.
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "shared"))
    common: dict[str, Any] = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "operations": "torch",
        "skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 4,
        "max_num_batched_tokens": 48, "block_size": BLOCK, "num_gpu_blocks_override": num_blocks,
    }  # fmt: skip
    prompts = 40, (30, 8, 26, 12)
    whole = EngineConfig(**common | {"num_gpu_blocks_override": 80}, attention_backend="torch")
    expected, _ = await answers(whole, plugins, *prompts)
    SharingAttention.steps.clear()
    executor = "recording" if recorded else "auto"
    config = EngineConfig(**common, attention_backend="sharing", executor=executor)
    tokens, preemptions = await answers(config, plugins, *prompts)
    assert tokens == expected and (preemptions > 0) is (num_blocks < 60)
    steps = SharingAttention.steps
    assert {rows for rows, _ in steps} <= {2, 3} and {shared for _, shared in steps} == {40}
    assert len(steps) > 15


async def test_graphs_of_steps_that_share_are_recorded_once_such_steps_come(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides those that are in spare time."""
    monkeypatch.setattr(decode_graphs, "SHARED_COST", 2.0)
    monkeypatch.setattr(step_graphs, "RECORDING_SECONDS", 0.0)
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "shared"))
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", operations="torch",
        skip_tokenizer_init=True, max_model_len=96, max_num_seqs=24, max_num_batched_tokens=48,
        block_size=BLOCK, attention_backend="sharing", executor="recording",
    )  # fmt: skip
    async with AsyncEngine(config, plugins=plugins) as engine:
        engine.core.steps._prepares = False
        executor: Any = engine.core.executor
        await executor.ask(Ping())
        graphs = executor._worker.runner.decode.graphs

        @torch.inference_mode()
        def serve() -> tuple[set[DecodeKey], list[DecodeKey]]:
            graphs.record(16, Ending.PLAIN)
            before = {key for key in graphs.missing() if key.shared}
            return before, [graphs._recorded(9, Ending.PLAIN, shared) for shared in (40, 40, 0)]

        @torch.inference_mode()
        def slots_of_logits() -> list[int]:
            """Where both graphs of eight rows have the slots of their logits."""
            plan = StepPlan(step=0, slots=(0, 1), num_tokens=(1, 1), samples=(True, True))
            places = []
            for key in (DecodeKey(8, Ending.LOGITS), DecodeKey(8, Ending.LOGITS, shared=True)):
                graphs.record(*key)
                graphs._replays[key] = lambda: None  # It writes where it was recorded.
            prefixes = iter((0, 40))
            batch = executor._worker.runner.batch
            monkeypatch.setattr(batch, "shared_prefix", lambda slots: next(prefixes))
            for _ in range(2):
                assert graphs.launch(plan, Ending.LOGITS)
                places.append(graphs.sampling_inputs(2)[0].data_ptr())
            return places

        before, keys = await executor._thread.call(serve)
        shared = {key for key in graphs.missing() if key.shared}
        plain, sharing = await executor._thread.call(slots_of_logits)
    # In spare time the others follow, of this ending alone.
    assert before == shared | {keys[1]}
    assert [key.shared for key in keys] == [False, True, False]
    assert keys[1] == DecodeKey(16, Ending.PLAIN, shared=True)
    assert plain != sharing, "a graph reads the slots of another"
    assert shared == {DecodeKey(rows, Ending.PLAIN, shared=True) for rows in (8, 24)}


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let Triton's backend share any prefix, in graphs that are recorded at once. → how layers were
    launched that did."""
    monkeypatch.setattr(decode_graphs, "SHARED_COST", 4.0)
    monkeypatch.setattr(step_graphs, "RECORDING_SECONDS", 600.0)  # Until all are recorded.
    monkeypatch.setattr(triton, "LEAST_PREFIX", 64)
    monkeypatch.setattr(triton, "PREFIX_BYTES", 0)
    kinds: list[str] = []
    attend = LayerCall.shared_prefix

    def noting(call: LayerCall, *arguments: Any) -> Any:
        layout = call.layout
        # While CUDA records, nothing can be read.
        if layout.seq_lens.device.type == "cuda" or int(layout.shared_prefix):
            alone = "recorded" if layout.max_seq_len == 128 else "launched"
            kinds.append("with a prompt" if layout.mixed is not None else alone)
        return attend(call, *arguments)

    monkeypatch.setattr(LayerCall, "shared_prefix", noting)
    return kinds


@interpreted
@pytest.mark.parametrize("recorded", [False, True])
async def test_tokens_of_kernels_that_read_a_prefix_once(
    recorded: bool, checkpoint: Path, kinds: list[str]
) -> None:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "shared"))
    common: dict[str, Any] = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "operations": "torch",
        "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 48, "block_size": BLOCK, "num_gpu_blocks_override": 80,
    }  # fmt: skip
    prompts = 72, (9, 3, 5, 3)
    expected = await answers(EngineConfig(**common, attention_backend="torch"), plugins, *prompts)
    executor = "recording" if recorded else "auto"
    config = EngineConfig(**common, attention_backend="triton", executor=executor)
    assert (await answers(config, plugins, *prompts))[0] == expected[0]
    assert set(kinds) == ({"recorded", "with a prompt"} if recorded else {"launched"})
    assert kinds.count("recorded" if recorded else "launched") > 8


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
async def test_tokens_of_cuda_graphs_that_read_a_prefix_once(
    eager: bool, checkpoint: Path, kinds: list[str]
) -> None:
    common: dict[str, Any] = {
        "model": str(checkpoint), "device": "cuda", "dtype": "float32",
        "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4,
        "max_num_batched_tokens": 48, "block_size": BLOCK, "num_gpu_blocks_override": 80,
        "attention_backend": "triton",
    }  # fmt: skip
    prompts = 72, (40, 20, 30, 20)
    apart = EngineConfig(**common, enable_prefix_caching=False, enforce_eager=True)
    expected, _ = await answers(apart, None, *prompts)
    assert not kinds
    tokens, _ = await answers(EngineConfig(**common, enforce_eager=eager), None, *prompts)
    assert ("launched" if eager else "recorded") in kinds
    # Sums in another order: a near tie may differ.
    assert sum(a == b for a, b in zip(tokens, expected, strict=True)) >= 3
