"""What the engine owes a KV connector: parameters in and out, blocks held, news between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams, hookimpl
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.parts.kv_transfer import KVReport
from jackfield.core.protocols import Executor
from jackfield.core.registry import load_plugins
from jackfield.core.scheduling.parts.kv_transfer import KVTransfer
from jackfield.entrypoints.server.app import make_app
from jackfield.plugins.executors.inprocess import InProcessExecutor


class Handover:
    """Keeps the blocks of each request that asks for it until `fetched` is called, as the producer
    of a prefill elsewhere would."""

    metadata_type = dict[int, list[int]]
    payload_type = str

    def __init__(self) -> None:
        self.reports: list[int] = []
        self.started: list[dict[int, list[int]]] = []
        self.events: list[str] = []

    jackfield_api = 3

    @hookimpl
    def register_kv_connectors(self, registry: Any) -> None:
        registry.add("handover", self)

    def make_scheduler(self, setup: Any) -> Any:
        return HandoverScheduler(self)

    def make_worker(self, setup: Any) -> Any:
        self.notify = setup.notify
        return HandoverWorker(self)

    def fetched(self, transfer: int) -> None:
        self.reports.append(transfer)
        self.notify()


class HandoverScheduler:
    def __init__(self, shared: Handover) -> None:
        self.shared = shared
        self.held: dict[int, list[int]] = {}

    def num_external_tokens(self, request: Any, num_computed_tokens: int) -> int:
        return 0

    def start_save(self, *_: Any) -> Sequence[int]:
        return ()

    def request_finished(self, transfer: int, request: Any) -> tuple[bool, dict[str, Any] | None]:
        options = request.params.kv_transfer_params or {}
        if not options.get("do_remote_decode"):
            return False, None
        self.held[transfer] = list(request.block_ids)
        return True, {"transfer": transfer, "blocks": len(request.block_ids), "given": options}

    def build_metadata(self) -> Any:
        pending, self.held = self.held, {}
        return pending or None

    def update(self, report: KVReport) -> None:
        self.shared.events.append(f"update {report.finished} {report.payload}")

    def close(self) -> None:
        self.shared.events.append("scheduler closed")


class HandoverWorker:
    def __init__(self, shared: Handover) -> None:
        self.shared = shared

    def bind(self, kv_caches: Sequence[Any]) -> None:
        assert kv_caches[0].shape[:3] == (2, 40, 4)

    def start(self, metadata: dict[int, list[int]]) -> None:
        self.shared.started.append(metadata)

    def poll(self) -> KVReport | None:
        if not self.shared.reports:
            return None
        ended, self.shared.reports = tuple(self.shared.reports), []
        return KVReport(finished=ended, payload="hello")

    def close(self) -> None:
        self.shared.events.append("worker closed")


CONFIG: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "max_model_len": 64,
    "num_gpu_blocks_override": 40,
    "kv_transfer_config": {"kv_connector": "handover"},
}
ASKED = {"do_remote_decode": True, "to": "elsewhere"}


def make_engine(shared: Handover, **options: Any) -> AsyncEngine:
    return AsyncEngine(EngineConfig(**CONFIG, **options), plugins=load_plugins(extra=[shared]))


async def generate(engine: AsyncEngine, **options: Any) -> Any:
    params = SamplingParams(
        temperature=0,
        ignore_eos=True,
        output_kind=OutputKind.FINAL_ONLY,
        **{"max_tokens": 1, **options},
    )
    async for output in engine.generate(list(range(20, 30)), params):
        last = output
    return last


async def until(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)


async def test_blocks_are_retained_after_the_end_until_the_worker_half_reports_it() -> None:
    shared = Handover()
    async with make_engine(shared) as engine:
        assert (await generate(engine)).kv_transfer_params is None
        assert engine.stats().kv_blocks_used == 0
        output = await generate(engine, kv_transfer_params=ASKED)
        params = output.kv_transfer_params
        assert params == {"transfer": params["transfer"], "blocks": 3, "given": ASKED}
        # Without another request: the metadata travel in a step of their own.
        await until(lambda: shared.started)
        assert list(shared.started[0]) == [params["transfer"]]
        assert engine.stats().kv_blocks_used == 3
        assert not await engine.reset_prefix_cache()
        await generate(engine)
        assert engine.stats().kv_blocks_used == 3
        shared.fetched(params["transfer"])
        await until(lambda: engine.stats().kv_blocks_used == 0)
        assert shared.events == [f"update ({params['transfer']},) hello"]
    assert shared.events[1:] == ["scheduler closed", "worker closed"]


async def test_each_completion_and_an_abort_are_reported() -> None:
    shared = Handover()
    async with make_engine(shared) as engine:
        output = await generate(engine, n=2, kv_transfer_params=ASKED)
        assert output.kv_transfer_params["given"] == ASKED
        await until(lambda: sum(map(len, shared.started)) == 2)
        stream = engine.generate(
            list(range(30, 40)), SamplingParams(max_tokens=40, kv_transfer_params=ASKED)
        )
        await anext(stream)
        await stream.aclose()
        await until(lambda: sum(map(len, shared.started)) == 3)
        for transfer in [t for started in shared.started for t in started]:
            shared.fetched(transfer)
        await until(lambda: engine.stats().kv_blocks_used == 0)


async def test_an_unknown_transfer_is_logged_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = Handover()
    async with make_engine(shared) as engine:
        await generate(engine, kv_transfer_params=ASKED)
        await until(lambda: shared.started)
        shared.fetched(12345)
        await until(lambda: shared.events)
        assert "12345" in caplog.text
        assert engine.stats().kv_blocks_used == 3


async def test_kv_transfer_params_through_http() -> None:
    shared = Handover()
    async with make_engine(shared) as engine:
        async with TestClient(TestServer(make_app(engine))) as client:
            completion = {"prompt": "Once", "max_tokens": 1, "kv_transfer_params": ASKED}
            chat = {
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 1,
                "kv_transfer_params": ASKED,
            }
            for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
                reply = await client.post(path, json=body)
                assert reply.status == 200, await reply.text()
                assert (await reply.json())["kv_transfer_params"]["given"] == ASKED
                del body["kv_transfer_params"]
                reply = await client.post(path, json=body)
                assert "kv_transfer_params" not in await reply.json()
                reply = await client.post(path, json={**body, "kv_transfer_params": "all"})
                assert reply.status == 400
                assert (await reply.json())["error"]["param"] == "kv_transfer_params"


def test_kv_transfer_params_must_be_an_object() -> None:
    with pytest.raises(InvalidRequest, match="kv_transfer_params"):
        SamplingParams(kv_transfer_params=["a"])  # type: ignore[arg-type]


async def test_an_executor_that_knows_no_connectors_is_refused() -> None:
    class Older(InProcessExecutor):
        watch_transfers = Executor.watch_transfers

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("older", Older)

    plugins = load_plugins(extra=[Handover(), Plugin()])
    engine = AsyncEngine(EngineConfig(**CONFIG, executor="older"), plugins=plugins)
    with pytest.raises(ConfigError, match="Older") as caught:
        await engine.start()
    assert caught.value.param == "kv_transfer_config"


async def test_a_worker_half_that_raises_is_closed_and_lets_the_blocks_go() -> None:
    shared = Handover()
    async with make_engine(shared) as engine:
        await generate(engine, kv_transfer_params=ASKED)
        await until(lambda: shared.started)
        assert engine.stats().kv_blocks_used == 3
        HandoverWorker.start, original = _broken, HandoverWorker.start
        try:
            await generate(engine, kv_transfer_params=ASKED)
            await until(lambda: engine.stats().kv_blocks_used == 0)
        finally:
            HandoverWorker.start = original
        assert shared.events == ["worker closed"] and engine.healthy
        assert (await generate(engine, kv_transfer_params=ASKED)).kv_transfer_params is None
    assert shared.events == ["worker closed", "scheduler closed"]


def _broken(self: Any, metadata: Any) -> None:
    raise RuntimeError("on purpose")


class Keeper(Handover):
    """Keeps what it is offered as it is told: takes it, declines it, or fails to store it."""

    payload_type = type(None)

    def __init__(self, answers: list[str]) -> None:
        super().__init__()
        self.answers = answers
        self.offered: list[list[int]] = []
        """Of each offer, the numbers of its blocks in the prompt."""

    def make_scheduler(self, setup: Any) -> Any:
        return KeeperScheduler(self)

    def make_worker(self, setup: Any) -> Any:
        return KeeperWorker(self)


class KeeperScheduler(HandoverScheduler):
    shared: Keeper

    def start_save(
        self, transfer: int, request: Any, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        self.shared.offered.append([request.block_hashes.index(key) for key in keys])
        answer = self.shared.answers.pop(0)
        if answer == "decline":
            return ()
        taken = block_ids[:1] if answer == "take one" else block_ids
        self.held[transfer] = {"fail": list(taken), "fail, unnamed": [-1]}.get(answer, [])
        return taken


class KeeperWorker:
    def __init__(self, shared: Keeper) -> None:
        self.started: dict[int, list[int]] = {}

    def bind(self, kv_caches: Sequence[Any]) -> None:
        pass

    def start(self, metadata: dict[int, list[int]]) -> None:
        self.started |= metadata

    def poll(self) -> KVReport | None:
        started, self.started = self.started, {}
        if not started:
            return None
        failed = {
            transfer: tuple(block for block in blocks if block >= 0)
            for transfer, blocks in started.items()
            if blocks
        }
        return KVReport(finished=tuple(started.keys() - failed.keys()), failed=failed)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answers", "offered"),
    [
        (["take"], [[0, 1]]),
        (["decline", "take"], [[0, 1], [0, 1]]),
        (["fail", "take"], [[0, 1], [0, 1]]),
        (["fail, unnamed", "take"], [[0, 1], [0, 1]]),
        (["take one", "take"], [[0, 1], [1]]),
    ],
)
async def test_cached_blocks_that_were_never_saved_are_offered_again(
    answers: list[str], offered: list[list[int]]
) -> None:
    """The engine's own cache has them, so that no step computes them again."""
    shared = Keeper(answers)
    async with make_engine(shared) as engine:
        for _ in range(4):
            await generate(engine)
            await until(lambda: not engine.stats().kv_blocks_used)
        assert engine.stats().prefix_cache_hits == 3 * 8
    assert (shared.offered, shared.answers) == (offered, [])


class Unreliable(Handover):
    """Promises two blocks of every prompt, and fails to load them without saying which."""

    payload_type = type(None)

    def make_scheduler(self, setup: Any) -> Any:
        return UnreliableScheduler(self)

    def make_worker(self, setup: Any) -> Any:
        return UnreliableWorker(self)


class UnreliableScheduler(HandoverScheduler):
    def num_external_tokens(self, request: Any, num_computed_tokens: int) -> int:
        return 8 - num_computed_tokens

    def start_load(
        self, transfer: int, request: Any, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        self.held[transfer] = list(block_ids)


class UnreliableWorker(KeeperWorker):
    def poll(self) -> KVReport | None:
        started, self.started = self.started, {}
        return KVReport(failed=dict.fromkeys(started, ())) if started else None


async def test_a_load_that_failed_without_naming_blocks_has_filled_none() -> None:
    shared = Unreliable()
    async with make_engine(shared) as engine:
        first = await generate(engine, max_tokens=4)
        assert first.num_cached_tokens == 0
        assert engine.stats().num_kv_load_failures == 1
        assert engine.stats().external_prefix_cache_hits == 0
    async with AsyncEngine(EngineConfig(**CONFIG | {"kv_transfer_config": None})) as engine:
        alone = await generate(engine, max_tokens=4)
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("reaches", [(None, None), (16,)])
def test_caches_that_drop_tokens_or_have_several_groups_are_not_transferred(
    reaches: tuple[int | None, ...],
) -> None:
    groups = [SimpleNamespace(reach=reach) for reach in reaches]
    services: Any = SimpleNamespace(kv=SimpleNamespace(groups=groups))
    with pytest.raises(ValueError, match="one group that keeps all tokens"):
        KVTransfer(services, connector=None, transfer=None)  # type: ignore[arg-type]
