"""Decode steps that are recorded and replayed give what launched steps give."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from replaying import Recorder, RecordingExecutor
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.operations import Operations
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.step import InProcess, Ping, StepPlan
from jackfield.core.worker.graphs import decode_graphs
from jackfield.core.worker.graphs.decode_graphs import DecodeKey
from jackfield.core.worker.graphs.endings import Ending, row_counts
from jackfield.core.worker.sampled import Sampled
from jackfield.core.worker.serving_process import freeze
from jackfield.core.worker.start import step_graphs
from jackfield.core.worker.worker import Worker
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.executors.inprocess import InProcessExecutor

from helpers import VOCAB, at_once, joining, make_checkpoint


class StaticTorchAttention(TorchAttention):
    """Fit to be called again and again with the same metadata: every length is the longest."""

    graph_safe = True

    def forward(self, spec: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any):
        metadata.chunks.clear()
        return super().forward(spec, query, key, value, kv_cache, metadata)


class WritingOperations(Operations):
    """Writes a step's tokens, on the CPU; not while a step is recorded."""

    name = "writing"
    writes_tokens = True
    recording = False
    writes = 0

    def write_tokens(
        self, chosen: torch.Tensor, runs: torch.Tensor, ring: torch.Tensor, last: int
    ) -> None:
        if not self.recording:
            runs.fill_(0 if int(runs) == last else int(runs) + 1)
            ring[int(runs) % len(ring), : 1 + len(chosen)] = torch.cat([runs, chosen])
            WritingOperations.writes += 1


class WritingRecorder(Recorder):
    """Its recordings write no tokens."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        WritingOperations.recording = True
        try:
            return super().__call__(function)
        finally:
            WritingOperations.recording = False


class StaticExecutor(RecordingExecutor):
    recorder_class = WritingRecorder


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("static", StaticExecutor)

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("static", StaticTorchAttention)

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        registry.add("writing", WritingOperations)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy, drawn, filtered, biased and scored ones, of many lengths."""
    draw = random.Random(3)
    extras: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.8},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.7, "repetition_penalty": 1.3},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "logit_bias": {5: 3.0}},
    ]
    pairs = []
    for number in range(20):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 60))]
        params = SamplingParams(
            max_tokens=draw.randrange(2, 30),
            seed=number,
            ignore_eos=True,
            detokenize=False,
            **extras[number % len(extras)],
        )
        pairs.append((prompt, params))
    return pairs


COMPRESSION = pytest.mark.parametrize(
    "compression",
    [
        {},
        {"kv_compression": "key_norm", "kv_compression_ratio": 0.4},
        pytest.param(
            {
                "kv_compression": "snap_kv",
                "kv_compression_budget": 16,
                "kv_compression_interval": 8,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["whole", "compressed", "by queries"],
)
"""The requests' caches, and so the positions of their steps."""


PLAIN = [number for number in range(20) if number % 8 < 2]
"""Requests that ask for a temperature at most."""


async def answers(
    config: EngineConfig, plugins: Any, numbers: Sequence[int] = range(20)
) -> list[Any]:
    def answer(output: RequestOutput) -> Any:
        choice = output.outputs[0]
        scores = [
            [round(p.logprob, 3) for p in position.values()] for position in choice.logprobs or []
        ]
        return choice.token_ids, choice.finish_reason, scores

    async with AsyncEngine(config, plugins=plugins) as engine:
        executor: Any = engine.core.executor
        while await executor._thread.call(executor._worker.prepare_ahead):
            pass
        outputs = await joining(engine, [requests()[number] for number in numbers])
        assert engine.stats().kv_blocks_used == 0
        assert (engine.stats().kv_compactions > 8) == (config.kv_compression is not None)
    return list(map(answer, outputs))


@COMPRESSION
async def test_replayed_steps_equal_launched_ones(
    checkpoint: Path, compression: dict[str, Any]
) -> None:
    await check_replays(checkpoint, "torch", range(20), compression)


async def test_steps_that_write_their_tokens_equal_launched_ones(checkpoint: Path) -> None:
    WritingOperations.writes = 0
    await check_replays(checkpoint, "writing", PLAIN, {})
    assert WritingOperations.writes > 20


async def check_replays(
    checkpoint: Path, operations: str, numbers: Sequence[int], more: dict[str, Any]
) -> None:
    """Compare steps of recorded graphs, with these operations, with launched ones."""
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    common: dict[str, Any] = {
        "model": str(checkpoint),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 96,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "block_size": 8,
        **more,
    }
    launched = await answers(
        EngineConfig(**common, attention_backend="torch", operations="torch"), plugins, numbers
    )
    static = EngineConfig(
        **common, attention_backend="static", executor="static", operations=operations
    )
    replayed = await answers(static, plugins, numbers)
    assert StaticExecutor.recorders[-1].replays > 20
    # Products of padded rows may differ in the last place, by the machine: a near tie may differ.
    same = sum(a == b for a, b in zip(launched, replayed, strict=True))
    assert same >= len(launched) - 1


class LaunchWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what launches do besides their replays, by plan: functions of Python that they call,
    and operations of torch."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.launches: list[tuple[StepPlan, int, int]] = []
        self._calls = self._operations = 0
        self._replaying = False
        self._record, self._launch = worker._recorder(), worker.step
        worker._recorder = lambda: self.record  # type: ignore[method-assign]
        worker.step = self.step  # type: ignore[method-assign]

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        assert self._record is not None
        replay = self._record(function)

        def apart() -> None:
            self._replaying = True
            replay()
            self._replaying = False

        return apart

    def step(self, plan: StepPlan, in_process: InProcess) -> Any:
        self._calls = self._operations = 0
        with self:
            sys.setprofile(self._note)
            try:
                step = self._launch(plan, in_process)
            finally:
                sys.setprofile(None)
        self.launches.append((plan, self._calls, self._operations))
        return step

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self._calls += event == "call" and not self._replaying

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operations += not self._replaying
        return func(*args, **kwargs or {})


async def test_a_step_with_the_rows_of_the_last_one_is_launched_by_little(
    checkpoint: Path,
) -> None:
    """By as much for many rows as for few, and with no operation of torch but the replay."""
    work: list[LaunchWork] = []

    class Watched(StaticExecutor):
        def __init__(self, config: Any, model_config: Any, plugins: Any) -> None:
            super().__init__(config, model_config, plugins)
            work.append(LaunchWork(self._worker))

    class Other(Plugin):
        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("watched", Watched)

    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64, block_size=8,
        operations="writing", attention_backend="static", executor="watched",
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)

    async def run_one(engine: AsyncEngine, first: int) -> None:
        async for _ in engine.generate([first, 6, 7], params):
            pass

    calls: dict[int, set[int]] = {}
    async with AsyncEngine(config, plugins=load_plugins(extra=[Other()])) as engine:
        executor: Any = engine.core.executor
        while await executor._thread.call(executor._worker.prepare_ahead):
            pass
        for count in (1, 4, 16):
            await at_once(engine, *(run_one(engine, 5 + n) for n in range(count)))
    launches, run = work[0].launches, 0
    for (before, *_), (plan, number, operations) in itertools.pairwise(launches):
        run = run + 1 if before.slots == plan.slots and not plan.table_writes else 0
        if run > 2:  # The rows' tables and blocks are as they were sent.
            assert operations == 0
            calls.setdefault(len(plan.slots), set()).add(number)
    # The least, as a collection of garbage may call functions in any of them.
    least = {count: min(numbers) for count, numbers in calls.items()}
    assert set(least) == {1, 4, 16} and len(set(least.values())) == 1, calls
    assert least[16] < 56, calls


def static_engine(checkpoint: Path) -> AsyncEngine:
    """Return an engine whose steps are recorded on the CPU."""
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=160, max_num_seqs=6, max_num_batched_tokens=128, operations="torch",
        attention_backend="static", executor="static",
    )  # fmt: skip
    return AsyncEngine(config, plugins=plugins)


async def test_spare_time_records_one_step_after_another(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for the recording in progress, and not for more."""
    monkeypatch.setattr(step_graphs, "RECORDING_SECONDS", 0.0)
    async with static_engine(checkpoint) as engine:
        executor: Any = engine.core.executor
        graphs = executor._worker._started.graphs
        steps: Any = engine.core.steps
        await steps.hold(graphs).wait()  # An idle engine records, too.
        counts = [graphs.num_recorded]
        while await executor._thread.call(torch.inference_mode()(graphs.record_next)):
            counts.append(graphs.num_recorded)
        assert all(after == before + 1 for before, after in itertools.pairwise(counts))
        assert len(counts) > 5 and not graphs.decode.missing()


async def test_a_stopped_engine_keeps_no_recorded_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its start was frozen: NCCL's end waits for all recorded steps that call it."""
    recorded: list[weakref.ref[Any]] = []

    class Noting(WritingRecorder):
        def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
            replay = super().__call__(function)
            recorded.append(weakref.ref(replay))
            return replay

    monkeypatch.setattr(StaticExecutor, "recorder_class", Noting)
    try:
        async with static_engine(checkpoint) as engine:
            freeze()
            params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
            await joining(engine, [([5, 6, n], params) for n in range(3)])
            assert recorded and all(each() is not None for each in recorded)
        assert gc.get_freeze_count() > 0
        assert not any(each() is not None for each in recorded)
    finally:
        gc.unfreeze()


def test_row_counts_end_with_the_most_that_can_run() -> None:
    assert row_counts(1) == [1]
    assert row_counts(6) == [1, 2, 4, 6]
    counts = row_counts(300)
    assert counts == sorted(set(counts)) and counts[-1] == 300
    assert all(b - a <= max(8, a) for a, b in itertools.pairwise(counts))


@pytest.mark.gpu
@COMPRESSION
@pytest.mark.parametrize("operations", ["torch", "triton"])
async def test_cuda_graphs_equal_launched_steps(
    checkpoint: Path, operations: str, compression: dict[str, Any]
) -> None:
    common: dict[str, Any] = {
        "model": str(checkpoint),
        "device": "cuda",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 96,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 100,
        "attention_backend": "triton",
        "operations": operations,
        "block_size": 8,
        **compression,
    }
    # A row's products differ in the last place with the number of rows: only near ties may differ.
    launched = await answers(EngineConfig(**common, enforce_eager=True), None)
    replayed = await answers(EngineConfig(**common), None)
    same = sum(a[0] == b[0] for a, b in zip(launched, replayed, strict=True))
    assert same >= len(launched) - 2
    assert torch.cuda.is_available()


def test_a_worker_on_a_cpu_records_nothing(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), device="cpu", max_num_batched_tokens=64)
    assert Worker(config, None, None)._recorder() is None  # type: ignore[arg-type]


async def test_what_cannot_be_recorded_is_counted_and_logged_once(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens come all the same, by launches."""

    class Failing(InProcessExecutor):
        def __init__(self, config: Any, model_config: Any, plugins: Any) -> None:
            super().__init__(config, model_config, plugins)
            self._worker._recorder = lambda: refuse  # type: ignore[method-assign]

    def refuse(function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    class Other(Plugin):
        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("failing", Failing)

    config = EngineConfig(
        model=str(checkpoint), device="cpu", executor="failing", attention_backend="static",
        max_model_len=64, max_num_seqs=2, cpu_kvcache_space=0.01, skip_tokenizer_init=True,
    )  # fmt: skip
    caplog.set_level("WARNING", "jackfield.worker")
    async with AsyncEngine(config, plugins=load_plugins(extra=[Other()])) as engine:
        stream = engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
        async for output in stream:
            last = output
        assert len(last.outputs[0].token_ids) == 3
        # Once before the step has run, and once after it.
        assert engine.stats().graph_recording_failures == 2
    messages = [record.getMessage() for record in caplog.records]
    assert sum("stream is capturing" in message for message in messages) == 1


async def test_work_in_spare_time_leaves_requests_alone(checkpoint: Path) -> None:
    """Recording and compiling ahead, between the steps of a request that draws in slot 0."""
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=96, max_num_seqs=6, max_num_batched_tokens=48, operations="torch",
        attention_backend="static", executor="static",
    )  # fmt: skip
    params = SamplingParams(max_tokens=40, seed=5, top_k=7, ignore_eos=True, detokenize=False)

    async def tokens(between: bool) -> list[int]:
        async with AsyncEngine(config, plugins=plugins) as engine:
            executor: Any = engine.core.executor
            async for out in engine.generate([5, 6, 7], params):
                last = out
                if between:
                    await executor._thread.call(executor._worker.prepare_ahead)
            if between:
                assert not executor._worker.runner.decode.graphs.missing()
        return list(last.outputs[0].token_ids)

    assert await tokens(True) == await tokens(False)


@pytest.mark.parametrize("in_traffic", [True, False])
async def test_larger_graphs_serve_until_enough_is_lost(
    in_traffic: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of a pipeline record nothing in a step; what cannot be recorded is tried once."""
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=96, max_num_seqs=24, max_num_batched_tokens=48, operations="torch",
        attention_backend="static", executor="static",
    )  # fmt: skip
    monkeypatch.setattr(decode_graphs, "PADDING_COST", 1 / 8)
    async with AsyncEngine(config, plugins=plugins) as engine:
        executor: Any = engine.core.executor
        graphs = executor._worker.runner.decode.graphs
        engine.core.steps._prepares = False
        await executor.ask(Ping())
        assert graphs._in_traffic
        graphs._in_traffic = in_traffic
        plain, replay = Ending.PLAIN, lambda: None
        graphs._replays = {DecodeKey(1, plain): replay, DecodeKey(16, plain): replay}

        @torch.inference_mode()
        def serving(*counts: int) -> list[int | None]:
            keys = [graphs._recorded(n, plain, 0) for n in counts]
            return [None if key is None else key.rows for key in keys]

        async def serve(*counts: int) -> list[int | None]:
            return await executor._thread.call(partial(serving, *counts))

        before = graphs.num_recorded
        # A step of 3 rows has 12 rows of padding, which cost 1.5 steps; one of 17 has no graph.
        steps = [await serve(1, 3, 16, 17) for _ in range(4)]
        if not in_traffic:
            assert steps == 4 * [[1, 16, 16, None]] and graphs.num_recorded == before
            return
        assert steps == [
            [1, 16, 16, None], [1, 16, 16, 24], [1, 4, 16, 24], [1, 4, 16, 24]
        ]  # fmt: skip
        assert graphs.num_recorded == before + 2
        assert [key.rows for key in graphs.missing() if key.ending is plain] == [8, 2]

        attempts = 0

        def refuse(function: Callable[[], None]) -> Callable[[], None]:
            nonlocal attempts
            attempts += 1
            raise RuntimeError("out of memory")

        graphs._record = refuse
        assert [await serve(8) for _ in range(6)] == 6 * [[16]]
        assert attempts == 2, "before and after the step ran"


async def test_what_a_step_chose_is_not_changed_by_the_next(checkpoint: Path) -> None:
    """Results are where each step writes them: two steps in flight must not share them."""
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=96, max_num_seqs=2, max_num_batched_tokens=48, operations="torch",
        attention_backend="static", executor="static",
    )  # fmt: skip
    async with AsyncEngine(config, plugins=plugins) as engine:
        executor: Any = engine.core.executor
        runner = executor._worker.runner
        with torch.inference_mode():
            token_ids = runner.sampler.outputs.chosen[:1]
            steps = []
            for token in (7, 9):
                token_ids[:] = token
                sampled = Sampled([0], {"chosen": token_ids}, {})
                steps.append(runner.copy_back(None, sampled=sampled))
        assert [step.kept_tokens() for step in steps] == [[[7]], [[9]]]
