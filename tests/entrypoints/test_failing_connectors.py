"""A KV connector that raises is named with its distribution and detached; requests go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_plugins import registering, settled
from serving import engine_config, save_random

from jackfield import AsyncEngine, SamplingParams
from jackfield.core.config import KVTransferConfig
from jackfield.core.parts.kv_transfer import KVReport
from jackfield.plugins.kv_connectors.cpu_offload import CpuOffloadConnector

from helpers import at_once

CONNECTOR_METHODS = (
    "num_external_tokens", "start_load", "start_save", "request_finished", "build_metadata",
    "update",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("connectors"))


class FailingScheduler:
    """Passes calls on to a connector that works, until it raises in `method`."""

    def __init__(self, inner: Any, method: str) -> None:
        self.inner = inner
        self.method = method
        self.after: list[str] = []
        """What was called after it had raised."""
        self.raised = False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.raised:
                self.after.append(name)
            result = getattr(self.inner, name)(*args)
            if name == self.method:
                self.raised = True
                raise RuntimeError("bang")
            return result

        return call


class FailingConnector:
    """`cpu_offload`, whose scheduler half is a FailingScheduler."""

    metadata_type = CpuOffloadConnector.metadata_type

    def __init__(self, method: str) -> None:
        self.method = method

    def make_scheduler(self, setup: Any) -> Any:
        self.half = FailingScheduler(CpuOffloadConnector.make_scheduler(setup), self.method)
        return self.half

    def make_worker(self, setup: Any) -> Any:
        return CpuOffloadConnector.make_worker(setup)


def connected(checkpoint: Path, connector: object, **transfer: Any) -> AsyncEngine:
    transfer_config = KVTransferConfig(**{"kv_connector": "bad", **transfer})
    config = engine_config(checkpoint, kv_transfer_config=transfer_config, block_size=4)
    return AsyncEngine(config, plugins=registering("kv_connector", connector))


async def tokens_of(engine: AsyncEngine, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    async with asyncio.timeout(300):
        *_, last = [output async for output in engine.generate(prompt, params)]
    assert last.error is None, last.error
    return last.outputs[0].token_ids


@pytest.mark.parametrize("method", CONNECTOR_METHODS)
async def test_a_connector_that_raises_is_detached_and_requests_go_on_without_it(
    method: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[5 + (i * step) % 90 for i in range(40)] for step in (1, 3, 7)]
    async with AsyncEngine(engine_config(checkpoint)) as engine:
        alone = [await tokens_of(engine, prompt) for prompt in prompts]
    connector = FailingConnector(method)
    async with connected(checkpoint, connector) as engine:
        for _ in range(2):  # What the first round has saved, the second loads.
            actual = await at_once(engine, *(tokens_of(engine, prompt) for prompt in prompts))
            assert actual == alone
            await settled(engine)
            assert await engine.reset_prefix_cache()
        assert connector.half.raised and engine.healthy
        assert await tokens_of(engine, prompts[0]) == alone[0]
        await settled(engine)
    message = (
        f"kv connector 'bad' of bad-dist 2.0 failed in {method}: RuntimeError: bang; it is detached"
    )
    assert caplog.text.count(message) == 1
    assert connector.half.after == ["close"]


async def test_a_request_whose_load_cannot_begin_fails_by_name_where_loads_may_not(
    checkpoint: Path,
) -> None:
    connector = FailingConnector("start_load")
    prompt = list(range(5, 45))
    async with connected(checkpoint, connector, kv_load_failure_policy="fail") as engine:
        alone = await tokens_of(engine, prompt)
        await settled(engine)
        assert await engine.reset_prefix_cache()
        *_, last = [output async for output in engine.generate(prompt)]
        assert last.error is not None and "kv connector 'bad' of bad-dist 2.0" in last.error
        assert await tokens_of(engine, prompt) == alone
        await settled(engine)


async def test_a_request_that_waits_for_the_answer_of_a_connector_that_raises_goes_on(
    checkpoint: Path,
) -> None:
    """Nothing else is there to be computed, and nobody will wake the engine."""
    connector = FailingConnector("build_metadata")
    async with connected(checkpoint, connector) as engine:
        connector.half.inner.num_external_tokens = lambda *_: None
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("num_external_tokens", "many"), ("start_save", None), ("start_save", [10_000]),
        ("request_finished", None), ("request_finished", (False, "far away")),
    ],
)  # fmt: skip
async def test_a_connector_whose_results_are_none_is_detached(
    method: str, result: object, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(checkpoint, FailingConnector("no method")) as engine:
        half = engine.core._connector
        assert half is not None
        setattr(half._connector.inner, method, lambda *_: result)
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
        await settled(engine)
    assert f"kv connector 'bad' of bad-dist 2.0 failed in {method}" in caplog.text


async def test_the_connector_among_several_that_raises_is_the_one_that_is_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {"connectors": [{"kv_connector": "cpu_offload"}, {"kv_connector": "bad"}]}
    connector = FailingConnector("start_save")
    options_ = {"kv_connector": "multi", "kv_connector_extra_config": parts}
    async with connected(checkpoint, connector, **options_) as engine:
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
        await settled(engine)
    assert "kv connector 'bad' of bad-dist 2.0 failed in start_save" in caplog.text


class FailingWorker:
    """Passes calls on to a worker half that works, until it raises after a call that `fails`
    chooses: (method, its arguments, what it returned)."""

    def __init__(self, inner: Any, fails: Callable[[str, Any, Any], bool]) -> None:
        self.inner = inner
        self.fails = fails
        self.after: list[str] = []
        self.raised = False
        self.may_close = threading.Event()
        self.may_close.set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.raised:
                self.after.append(name)
            if name == "close":
                assert self.may_close.wait(300)
            result = getattr(self.inner, name)(*args)
            if self.fails(name, args, result):
                self.raised = True
                raise RuntimeError("bang")
            return result

        return call


class HalfConnector:
    """`cpu_offload`, whose worker half is a FailingWorker."""

    metadata_type = CpuOffloadConnector.metadata_type

    def __init__(self, fails: Callable[[str, Any, Any], bool]) -> None:
        self.fails = fails

    def make_scheduler(self, setup: Any) -> Any:
        self.scheduler = FailingScheduler(CpuOffloadConnector.make_scheduler(setup), "no method")
        return self.scheduler

    def make_worker(self, setup: Any) -> Any:
        self.half = FailingWorker(CpuOffloadConnector.make_worker(setup), self.fails)
        return self.half


def in_the_first_load(method: str, args: Any, result: Any) -> bool:
    return method == "start" and bool(args[0].loads)


CHOSEN: dict[str, Callable[[str, Any, Any], bool]] = {
    "start, with the first save": lambda method, args, result: method == "start",
    "start, with the first load": in_the_first_load,
    "poll, at once": lambda method, args, result: method == "poll",
    "poll, with its first report": lambda method, args, result: (
        method == "poll" and result is not None
    ),
}


@pytest.mark.parametrize("selection", CHOSEN)
async def test_a_worker_half_that_raises_is_detached_and_requests_go_on_without_it(
    selection: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[5 + (i * step) % 90 for i in range(40)] for step in (1, 3, 7)]
    async with AsyncEngine(engine_config(checkpoint)) as engine:
        alone = [await tokens_of(engine, prompt) for prompt in prompts]
    connector = HalfConnector(CHOSEN[selection])
    async with connected(checkpoint, connector) as engine:
        for _ in range(2):  # What the first round has saved, the second loads.
            actual = await at_once(engine, *(tokens_of(engine, prompt) for prompt in prompts))
            assert actual == alone
            await settled(engine)
            assert await engine.reset_prefix_cache()
        assert connector.half.raised and engine.healthy
        request = len(connector.scheduler.after)
        connector.scheduler.raised = True  # Notes what is called from now on.
        assert await tokens_of(engine, prompts[0]) == alone[0]
        await settled(engine)
        assert len(connector.scheduler.after) == request
    method = selection.partition(",")[0]
    message = (
        f"kv connector 'bad' of bad-dist 2.0 failed in {method}: RuntimeError: bang; it is det"
    )
    assert caplog.text.count(message) == caplog.text.count("is detached") == 1
    assert connector.half.after == ["close"]
    assert connector.scheduler.after == ["close"]


async def test_blocks_are_retained_until_a_worker_half_that_raised_has_closed(
    checkpoint: Path,
) -> None:
    """It may write to them until then; the request that waits for its load does not wait."""
    connector = HalfConnector(in_the_first_load)
    prompt = list(range(5, 45))
    async with connected(checkpoint, connector) as engine:
        alone = await tokens_of(engine, prompt)
        await settled(engine)
        assert await engine.reset_prefix_cache()
        connector.half.may_close.clear()
        assert await tokens_of(engine, prompt) == alone
        assert await tokens_of(engine, prompt) == alone
        assert connector.half.raised and engine.stats().kv_blocks_used == 9
        assert engine.stats().num_kv_load_failures == 1
        engine.core.scheduler.check_invariants()
        connector.half.may_close.set()
        await settled(engine)


async def test_a_request_whose_load_is_cut_short_fails_by_name_where_loads_may_not(
    checkpoint: Path,
) -> None:
    connector = HalfConnector(in_the_first_load)
    prompt = list(range(5, 45))
    async with connected(checkpoint, connector, kv_load_failure_policy="fail") as engine:
        alone = await tokens_of(engine, prompt)
        await settled(engine)
        assert await engine.reset_prefix_cache()
        *_, last = [output async for output in engine.generate(prompt)]
        assert last.error is not None and "kv connector 'bad' of bad-dist 2.0" in last.error
        assert await tokens_of(engine, prompt) == alone
        await settled(engine)


async def test_a_worker_half_that_cannot_even_close_costs_the_blocks_of_its_transfers(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector = HalfConnector(
        lambda method, args, result: method == "close" or in_the_first_load(method, args, result)
    )
    prompt = list(range(5, 45))
    async with connected(checkpoint, connector) as engine:
        alone = await tokens_of(engine, prompt)
        await settled(engine)
        assert await engine.reset_prefix_cache()
        assert await tokens_of(engine, prompt) == alone
        async with asyncio.timeout(300):
            while "9 KV blocks are out of use" not in caplog.text:
                await asyncio.sleep(0.001)
        assert await tokens_of(engine, prompt) == alone
        assert engine.healthy and engine.stats().kv_blocks_used == 9
        engine.core.scheduler.check_invariants()
    assert "kv connector 'bad' of bad-dist 2.0 failed in close: RuntimeError: bang" in caplog.text


@pytest.mark.parametrize(
    "report", [17, KVReport(finished=("one",)), KVReport(failed={1: None})]  # type: ignore[dict-item,arg-type]
)  # fmt: skip
async def test_a_worker_half_whose_report_is_none_is_detached(
    report: object, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector = HalfConnector(lambda *_: False)
    async with connected(checkpoint, connector) as engine:
        connector.half.inner.poll = lambda: report
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
        await settled(engine)
    assert "kv connector 'bad' of bad-dist 2.0 failed in poll: TypeError" in caplog.text


async def test_a_worker_half_that_raises_while_the_engine_stops_is_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector = HalfConnector(lambda method, args, result: method == "close")
    async with connected(checkpoint, connector) as engine:
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
    assert "kv connector 'bad' of bad-dist 2.0 failed in close: RuntimeError: bang" in caplog.text
    assert "stopping the executor" not in caplog.text


async def test_the_worker_half_among_several_that_raises_is_the_one_that_is_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {"connectors": [{"kv_connector": "bad"}, {"kv_connector": "cpu_offload"}]}
    connector = HalfConnector(lambda method, args, result: method in ("poll", "close"))
    options_ = {"kv_connector": "multi", "kv_connector_extra_config": parts}
    before = set(threading.enumerate())
    async with connected(checkpoint, connector, **options_) as engine:
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
    assert "kv connector 'bad' of bad-dist 2.0 failed in poll" in caplog.text
    assert "kv connector 'bad' of bad-dist 2.0 failed in close" in caplog.text
    remaining = {thread.name for thread in set(threading.enumerate()) - before}
    assert not remaining & {"jackfield-kv-load", "jackfield-kv-save"}, "the other one is not closed"
