"""A server takes as many requests as it can serve soon; batches and programs queue as they like."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from scheduling_simulator import ByArrival, StepTime, simulate, synthetic_traffic
from serving import Server, engine_config, running, save_random

from jackfield import AsyncEngine, SamplingParams
from jackfield.core.outputs import EngineStats
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.entrypoints.http import concurrency_limit
from jackfield.entrypoints.http.concurrency_limit import num_runnable, waiting_limit
from jackfield.entrypoints.http.options import ServerOptions

COMPLETIONS = "/v1/completions"
LIMIT = 3


def admits(stats: EngineStats) -> bool:
    """Whether `limit_waiting` takes a request, when all of them are in the engine."""
    present = stats.num_requests_waiting + stats.num_requests_running
    return present - num_runnable(stats) < waiting_limit(num_runnable(stats))


@pytest.mark.parametrize(
    ("slots", "num_blocks", "runnable"),
    [
        pytest.param(256, 20_000, 256, marks=pytest.mark.slow, id="slots"),
        pytest.param(64, 5_000, 64, id="few slots"),
        pytest.param(256, 2_000, 62, id="a cache for a fifth of the slots"),
    ],
)
def test_goodput_stays_at_five_times_capacity(slots: int, num_blocks: int, runnable: int) -> None:
    """Goodput: what is generated for requests whose first token comes in time, of what the engine
    generates at most."""

    def run(rate: float, count: int, admits: Callable[[EngineStats], bool]) -> Any:
        scheduler = Scheduler(
            max_num_seqs=slots,
            max_num_batched_tokens=2048,
            max_model_len=2048,
            num_blocks=num_blocks,
            block_size=16,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            policy=ByArrival(),
        )
        traffic = synthetic_traffic(count, rate=rate, prompt_len=400, output_len=100, seed=1)
        return simulate(traffic, scheduler, StepTime(0.02, 0.00001), admits=admits)

    most = run(1000.0, 1200, lambda stats: True)
    capacity = most.tokens_per_second
    rate = 5 * capacity / 100
    limited = run(rate, 6000, admits)
    unlimited = run(rate, 3000, lambda stats: True)
    mean_time = 100 * limited.virtual_seconds / limited.steps  # Of a request that runs.
    assert limited.refused > 0
    assert limited.tokens_per_second >= 0.9 * capacity
    # As many wait as may, for as long as it takes until so many have ended.
    assert limited.queueing_p99 < (1 + waiting_limit(runnable) / runnable) * mean_time
    # Without a limit the wait grows with the traffic.
    assert 1.5 * limited.queueing_p99 < unlimited.queueing_p50


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    options = ServerOptions(max_waiting=LIMIT)
    with running(engine_config(checkpoint, max_num_seqs=2), options) as running_server:
        yield running_server


class Gate:
    """Keeps an engine from stepping while it is closed."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.closed = True
        scheduler = server.engine.core.scheduler  # type: ignore[attr-defined]
        schedule = scheduler.schedule
        monkeypatch.setattr(
            scheduler, "schedule", lambda *args: None if self.closed else schedule(*args)
        )

    def open(self) -> None:
        self.closed = False
        self.server.call(lambda engine: engine.core.steps.wake())


def post(server: Server, route: str = COMPLETIONS, **body: Any) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": 3, **body}
    return httpx.post(server.url + route, json=body, timeout=120)


def in_flight(server: Server, count: int) -> bool:
    return bool(httpx.get(server.url + "/load").json()["server_load"] == count)


def test_a_request_beyond_those_that_may_wait_gets_a_503_and_the_others_are_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(server, monkeypatch)
    with ThreadPoolExecutor(2 + LIMIT) as clients:
        taken = [clients.submit(post, server) for _ in range(2 + LIMIT)]
        ticks = threading.Event()
        while not in_flight(server, 2 + LIMIT):
            ticks.wait(0.01)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for route, body in ((COMPLETIONS, {}), ("/v1/chat/completions", chat)):
            refused = post(server, route, **body)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"]
            assert refused.json()["error"]["type"] == "overloaded_error"
        # Routes that do not run the model are served.
        assert httpx.get(server.url + "/v1/models").status_code == 200
        assert post(server, "/tokenize").status_code == 200
        gate.open()
        assert [future.result().status_code for future in taken] == [200] * (2 + LIMIT)
    assert post(server).status_code == 200


def test_a_request_of_many_prompts_is_taken_as_a_whole(server: Server) -> None:
    response = post(server, prompt=["hi"] * 20, n=2)
    assert response.status_code == 200 and len(response.json()["choices"]) == 40


def test_by_default_one_may_wait_for_two_slots(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [waiting_limit(slots) for slots in (1, 256, 300, 1024)] == [128, 128, 150, 512]
    full = EngineStats(num_slots=256, num_requests_running=100, kv_cache_usage=0.95)
    assert num_runnable(full) == 100
    with running(engine_config(checkpoint, max_num_seqs=2)) as server:
        gate = Gate(server, monkeypatch)
        monkeypatch.setattr(concurrency_limit, "MIN_WAITING", 16)
        with ThreadPoolExecutor(18) as clients:
            taken = [clients.submit(post, server) for _ in range(18)]
            while not in_flight(server, 18):
                threading.Event().wait(0.01)
            assert post(server).status_code == 503
            gate.open()
            assert {future.result().status_code for future in taken} == {200}


@pytest.mark.parametrize(
    ("options", "engine"),
    [({"max_waiting": 0}, {}), ({"max_concurrency": 50}, {}), ({}, {"max_waiting_requests": 50})],
)
def test_another_limit_takes_the_place_of_the_default(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, int],
    engine: dict[str, int],
) -> None:
    monkeypatch.setattr(concurrency_limit, "MIN_WAITING", 16)
    config = engine_config(checkpoint, max_num_seqs=2, **engine)
    with running(config, ServerOptions(**options)) as server:
        gate = Gate(server, monkeypatch)
        with ThreadPoolExecutor(24) as clients:
            taken = [clients.submit(post, server) for _ in range(24)]
            while not in_flight(server, 24):
                threading.Event().wait(0.01)
            gate.open()
            assert {future.result().status_code for future in taken} == {200}


async def test_an_engine_in_a_program_queues_what_it_is_given(checkpoint: Path) -> None:
    async with AsyncEngine(engine_config(checkpoint, max_num_seqs=2)) as engine:

        async def one() -> None:
            async for _ in engine.generate([5, 6], SamplingParams(max_tokens=1)):
                pass

        await asyncio.gather(*(one() for _ in range(200)))
