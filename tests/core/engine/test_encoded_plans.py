"""Every plan of an engine is what comes out of its bytes, and so is every result."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jackfield import AsyncEngine, EngineConfig, PoolingParams, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.parts.part_types import PartTypes, SentTypes
from jackfield.core.protocols import LogitsProcessor, LogitsProcessorSetup, ProcessedRows
from jackfield.core.registry import Plugins, load_plugins
from jackfield.core.sampling_params import OutputKind, StructuredOutputsParams
from jackfield.core.step import NOTHING_IN_PROCESS, InProcess, SlotStart, StepPlan, StepResult
from jackfield.plugins.executors.inprocess import InProcessExecutor

from helpers import at_once

PLANS = msgspec.msgpack.Decoder(StepPlan)
RESULTS = msgspec.msgpack.Decoder(StepResult)
TEXT = [60 + (i * i) % 190 for i in range(24)]


class EncodingExecutor(InProcessExecutor):
    """Gives the worker what it decodes from each plan's bytes, and the engine from each result's;
    beside the plan go the grammars of the slots that start, and nothing else."""

    plans: list[StepPlan] = []

    def submit(self, plan: StepPlan, in_process: InProcess) -> asyncio.Future[StepResult]:
        sent = PartTypes().plan(PLANS.decode(msgspec.msgpack.encode(plan)))
        assert sent == plan
        self.plans.append(sent)
        held = {start.slot for start in plan.starts if start.grammar is not None}
        assert held == set(in_process.grammars)
        return asyncio.ensure_future(self._received(super().submit(sent, in_process)))

    async def _received(self, future: asyncio.Future[StepResult]) -> StepResult:
        result = await future
        received = PartTypes().result(RESULTS.decode(msgspec.msgpack.encode(result)))
        assert received == result
        return received


class Only(LogitsProcessor):
    """Leaves one token."""

    parameters = frozenset({"only"})
    examples = ({"only": [3]},)

    def __init__(self, setup: LogitsProcessorSetup) -> None:
        self.tokens: dict[int, list[int]] = {}

    def start(self, slot: int, request: SlotStart) -> bool:
        self.tokens[slot] = (request.params.extra_args or {}).get("only") or []
        return bool(self.tokens[slot])

    def apply(self, logits: Any, rows: ProcessedRows) -> Any:
        for row, slot in enumerate(rows.slots):
            kept = logits[row, self.tokens[slot]].clone()
            logits[row] = -float("inf")
            logits[row, self.tokens[slot]] = kept
        return logits


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("encoding", EncodingExecutor)

    @hookimpl
    def register_logits_processors(self, registry: Any) -> None:
        registry.add("only", Only)


def plugins() -> Plugins:
    return load_plugins(extra=[Plugin()])


def sampling(**options: Any) -> SamplingParams:
    settings = {"max_tokens": 12, "seed": 5, "ignore_eos": True, **options}
    return SamplingParams(output_kind=OutputKind.FINAL_ONLY, **settings)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MIXED = [
    sampling(temperature=0.0, logprobs=3, prompt_logprobs=1),
    sampling(n=3, top_p=0.9, logit_bias={70: 2.5}, stop_token_ids=[61]),
    sampling(ignore_eos=False, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    sampling(ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[ab]{3,9}")),
    sampling(presence_penalty=0.5, repetition_penalty=1.2, bad_words=["the"], min_tokens=4),
    sampling(extra_args={"only": [70, 71, 72]}, allowed_token_ids=list(range(60, 90))),
]


def config(executor: str, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 128,
        "max_num_seqs": 6, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 40, **options,
    }  # fmt: skip
    return EngineConfig(executor=executor, **settings)


async def served(executor: str, **options: Any) -> list[Any]:
    """Tokens of a mixed load that preempts, twice: the second time there are prefix hits."""

    async def ask(engine: AsyncEngine, number: int) -> Any:
        stream = engine.generate([70 + number, *TEXT], MIXED[number])
        outputs = [output async for output in stream]
        assert outputs[-1].error is None
        return [(done.token_ids, done.logprobs) for done in outputs[-1].outputs]

    async with AsyncEngine(config(executor, **options), plugins=plugins()) as engine:
        rounds = []
        for _ in range(2):
            rounds.append(
                await at_once(engine, *(ask(engine, number) for number in range(len(MIXED))))
            )
        assert engine.stats().num_preemptions > 0
        return rounds


async def test_a_worker_that_gets_plans_as_bytes_chooses_the_same_tokens() -> None:
    EncodingExecutor.plans.clear()
    assert await served("encoding") == await served("inprocess")
    starts = [start for plan in EncodingExecutor.plans for start in plan.starts]
    assert any(start.grammar is not None for start in starts)
    assert any(start.bad_words_token_ids for start in starts)
    assert any(start.num_computed_tokens for start in starts), "no prefix hit"


async def test_so_does_one_with_a_kv_connector(tmp_path: Path) -> None:
    options = {"cpu_offload": {"kv_offloading_size": 0.01}, "file_store": {"path": str(tmp_path)}}
    parts = [
        {"kv_connector": name, "kv_connector_extra_config": extra}
        for name, extra in options.items()
    ]
    transfer = {"kv_connector": "multi", "kv_connector_extra_config": {"connectors": parts}}
    EncodingExecutor.plans.clear()
    sent = await served("encoding", kv_transfer_config=transfer)
    assert any("kv_transfer" in plan.parts for plan in EncodingExecutor.plans)
    assert [[tokens for tokens, _ in one] for one in sent[0]] == [
        [tokens for tokens, _ in one] for one in (await served("inprocess"))[0]
    ]


async def test_so_does_one_that_pools() -> None:
    async def vectors(executor: str) -> list[bytes]:
        async with AsyncEngine(config(executor, runner="pooling"), plugins=plugins()) as engine:
            outputs = [
                await engine.encode(TEXT[: 4 + number], PoolingParams(dimensions=None))
                for number in range(3)
            ]
            empty = StepPlan(99, (), (), (), released=(0,))
            result = await engine.core.executor.submit(empty, NOTHING_IN_PROCESS)
            assert (result.step, result.counts) == (99, [])
            return [output.outputs.data.tobytes() for output in outputs]

    assert await vectors("encoding") == await vectors("inprocess")


class Untyped:
    """A KV connector whose metadata are not what it declares."""

    metadata_type = dict[int, int]

    jackfield_api = 3

    @hookimpl
    def register_kv_connectors(self, registry: Any) -> None:
        registry.add("untyped", self)

    def make_scheduler(self, setup: Any) -> Any:
        return self

    def make_worker(self, setup: Any) -> Any:
        return self

    def bind(self, kv_caches: Any) -> None:
        pass

    def num_external_tokens(self, request: Any, num_computed_tokens: int) -> int:
        return 0

    def start_save(self, *_: Any) -> tuple[int, ...]:
        return ()

    def request_finished(self, transfer: int, request: Any) -> tuple[bool, None]:
        return False, None

    def build_metadata(self) -> Any:
        return {7: "seven"}

    def start(self, metadata: Any) -> None:
        raise AssertionError("it was decoded all the same")

    def poll(self) -> None:
        return None

    def close(self) -> None:
        pass


async def test_metadata_of_another_type_detach_the_worker_half_by_field(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = config("inprocess", kv_transfer_config={"kv_connector": "untyped"})
    async with AsyncEngine(made, plugins=load_plugins(extra=[Untyped()])) as engine:
        async for output in engine.generate(TEXT, sampling()):
            assert output.error is None
    assert (
        "failed in start: ValidationError: Expected `int`, got `str` - at `$[...]`" in caplog.text
    )


@pytest.mark.parametrize("name", ["states", "nobody's"])
def test_what_no_part_sends_is_refused_by_name(name: str) -> None:
    result = StepResult(0, [], [], parts={name: None})
    with pytest.raises(msgspec.ValidationError, match=f"no part {name!r} sends a result"):
        PartTypes({"nobody's": SentTypes()}).result(result)
