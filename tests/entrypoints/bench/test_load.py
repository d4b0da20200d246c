"""Load on servers that behave and that do not: real sockets, answers made up by hand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from jackfield.core.metrics.metrics import EngineMetrics
from jackfield.core.outputs import EngineStats
from jackfield.entrypoints.bench.serve.clients import LoadResult, send_load
from jackfield.entrypoints.bench.serve.latency_stats import (
    cache_counters,
    late_preparations,
    launch_waits,
    quantile,
    summarize,
)
from jackfield.entrypoints.bench.serve.load import (
    TIMER_SECONDS,
    Load,
    RequestResult,
    Target,
    arrivals,
    client,
    drive,
    send,
)
from jackfield.entrypoints.bench.serve.plots import plot_load
from jackfield.entrypoints.bench.workloads import BenchRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PIECE = {"choices": [{"index": 0, "text": "t1", "finish_reason": None}]}


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Target]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield Target(url=f"http://127.0.0.1:{port}", model="m", timeout=300)
    finally:
        await runner.cleanup()


def streaming(*frames: Any, status: int = 200) -> Handler:
    """Sends these and ends; a float is a pause, a string is sent as it is."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for frame in frames:
            if isinstance(frame, float):
                await asyncio.sleep(frame)
            else:
                data = frame if isinstance(frame, str) else json.dumps(frame)
                await response.write(f"data: {data}\n\n".encode())
        await response.write_eof()
        return response

    return handler


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def one(handler: Handler, output: int = 3, **changes: Any) -> RequestResult:
    async def main() -> RequestResult:
        async with serving(handler) as target:
            changed = Target(url=target.url, model="m", **changes)
            async with client(changed) as session:
                return await send(session, changed, BenchRequest([1, 2, 3], output))

    return asyncio.run(main())


def test_times_of_a_stream_are_those_of_its_pieces() -> None:
    for _ in range(50):
        result = one(streaming(0.05, PIECE, 0.1, PIECE, 0.2, PIECE, usage(3), "[DONE]"))
        assert result.error is None
        assert (result.prompt_tokens, result.output_tokens) == (3, 3)
        assert result.ttft >= 0.05
        assert result.tpot == pytest.approx(sum(result.itl) / 2)
        assert result.e2el == pytest.approx(result.ttft + sum(result.itl))
        # Pieces of a busy machine come late, but not each time.
        if result.ttft < 0.1 and result.itl == pytest.approx([0.1, 0.2], abs=0.04):
            return
    pytest.fail(f"the last of 50 streams: {result.ttft}, {result.itl}")


def test_a_role_and_a_reason_are_no_tokens_of_a_chat() -> None:
    def delta(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}

    result = one(
        streaming(delta(role="assistant", content=""), 0.1, delta(content="a"),
                  delta(content="b"), delta(), usage(2), "[DONE]"),
        output=2, endpoint="/v1/chat/completions",
    )  # fmt: skip
    assert result.error is None
    assert len(result.times) == 2 and result.ttft >= 0.1


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (streaming("no", status=503), "status 503"),
        (streaming(PIECE, {"error": {"message": "it broke"}}, "[DONE]"), "it broke"),
        (streaming(PIECE, PIECE, PIECE, usage(3)), "broke off"),
        (streaming(PIECE, PIECE, usage(2), "[DONE]"), "2 tokens came instead of 3"),
        (streaming("{", "[DONE]"), "DecodeError"),
        (streaming(PIECE, "[DONE]"), "no usage"),
    ],
    ids=["refused", "failed", "cut", "short", "no JSON", "not counted"],
)
def test_an_answer_that_is_not_whole_is_an_error(handler: Handler, message: str) -> None:
    result = one(handler)
    assert result.error is not None and message in result.error


def whole(*, output: int = 1, count: int = 1, **changes: Any) -> Load:
    chats = [[BenchRequest([1, 2, 3], output)] for _ in range(count)]
    return Load(**{"chats": chats, "offsets": [0.0] * count, **changes})


def test_pieces_cut_anywhere_are_the_same_pieces() -> None:
    """Frames come as the network cuts them."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        text = "".join(f"data: {json.dumps(each)}\n\n" for each in (PIECE, PIECE, usage(2)))
        for letter in (text + "data: [DONE]\n\n").encode():
            await response.write(bytes([letter]))
        return response

    result = one(handler, output=2)
    assert result.error is None and len(result.times) == 2 and result.output_tokens == 2


def test_a_server_that_is_not_there_is_an_error() -> None:
    target = Target(url="http://127.0.0.1:9", model="m")
    outcome = asyncio.run(send_load(target, whole(count=3, max_concurrency=2)))
    assert [result.error is not None for result in outcome.results] == [True] * 3
    record = summarize([outcome])
    assert record["failed"] == 3 and record["first_failure"] == outcome.results[0].error
    assert record["measured"]["requests_per_second"] == 0


@pytest.mark.parametrize("processes", [1, 3])
def test_a_closed_loop_keeps_so_many_open_and_no_more(processes: int) -> None:
    open_now, most = 0, 0
    full = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 4:
            full.set()
        await full.wait()
        await asyncio.sleep(0.02)  # For more to come.
        open_now -= 1
        return web.json_response(usage(1))

    async def main() -> LoadResult:
        async with serving(handler) as target:
            quiet = Target(url=target.url, model="m", stream=False)
            load = whole(count=20, max_concurrency=4)
            return await send_load(quiet, load, processes=processes)

    outcome = asyncio.run(main())
    assert len(outcome.results) == 20 and not [a.error for a in outcome.results if a.error]
    assert most == 4
    assert outcome.seconds > 0 and outcome.cpu_share > 0


def test_shares_of_a_load_are_the_load() -> None:
    chats = [[BenchRequest([number], 1)] for number in range(7)]
    load = Load(chats=chats, offsets=[float(n) for n in range(7)], max_concurrency=5)
    shares = list(load.split(3))
    assert sorted(chat[0].prompt[0] for share in shares for chat in share.chats) == list(range(7))
    assert [share.max_concurrency for share in shares] == [2, 2, 1]
    for share in shares:
        assert share.offsets == [chat[0].prompt[0] for chat in share.chats]
    assert len(list(whole(count=2).split(5))) == 2


def test_an_open_loop_does_not_wait() -> None:
    """All requests arrive though none is answered before the last has come."""
    came = 0
    all_came = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal came
        came += 1
        if came == 10:
            all_came.set()
        await all_came.wait()
        return web.json_response(usage(1))

    async def main() -> list[RequestResult]:
        async with serving(handler) as target:
            quiet = Target(url=target.url, model="m", stream=False)
            return await drive(quiet, whole(count=10, offsets=arrivals(10, 50.0, float("inf"))))

    results = asyncio.run(main())
    assert came == 10
    due = sorted(handler.sent for handler in results)
    pauses = [after - before for before, after in itertools.pairwise(due)]
    assert pauses == pytest.approx([1 / 50] * 9, abs=2 * TIMER_SECONDS), "as each was due"


def test_a_chat_sends_all_that_was_said_and_ends_with_its_first_error() -> None:
    prompts: list[list[int]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompts.append(body["prompt"])
        if len(prompts) == 3:
            return web.json_response({"error": "no more"}, status=400)
        choice = {"index": 0, "text": "", "token_ids": [70 + len(prompts)] * body["max_tokens"]}
        return await streaming({"choices": [choice]}, usage(2), "[DONE]")(request)

    async def main() -> list[RequestResult]:
        async with serving(handler) as target:
            turns = [
                BenchRequest([1, 2], 2),
                BenchRequest([3], 2),
                BenchRequest([4], 2),
                BenchRequest([5], 2),
            ]
            return await drive(target, Load(chats=[turns], offsets=[0.0]))

    results = asyncio.run(main())
    assert prompts == [[1, 2], [1, 2, 71, 71, 3], [1, 2, 71, 71, 3, 72, 72, 4]]
    errors = [handler.error or "" for handler in results]
    assert errors[:2] == ["", ""] and "status 400" in errors[2] and "turn 3" in errors[3]


@pytest.mark.parametrize(("burstiness", "deviation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_come_at_the_rate(burstiness: float, deviation: float) -> None:
    """The deviation of a gamma distribution is its mean over the root of its shape."""
    due = arrivals(8001, 10.0, burstiness, seed=3)
    pauses = [after - before for before, after in itertools.pairwise(due)]
    mean = sum(pauses) / len(pauses)
    assert mean == pytest.approx(0.1, rel=0.05)
    spread = (sum((pause - mean) ** 2 for pause in pauses) / len(pauses)) ** 0.5
    assert spread / mean == pytest.approx(deviation, rel=0.1)
    assert due == arrivals(8001, 10.0, burstiness, seed=3), "the same again"
    assert due != arrivals(8001, 10.0, burstiness, seed=4)


def test_arrivals_at_once_and_evenly() -> None:
    assert arrivals(3, float("inf")) == [0.0, 0.0, 0.0]
    assert arrivals(4, 2.0, float("inf")) == [0.0, 0.5, 1.0, 1.5]


def made_up(start: float, *times: float) -> RequestResult:
    return RequestResult(sent=start, times=list(times), prompt_tokens=10, output_tokens=len(times))


def test_percentiles_are_over_all_requests_and_rates_over_repeats() -> None:
    quick = made_up(0.0, 0.1, 0.2, 0.3)
    slow = made_up(1.0, 1.3, 1.6, 1.9)
    lost = RequestResult(sent=0.0, error="gone")
    runs = [LoadResult([quick, slow, lost], 1.0, 0.2), LoadResult([quick, slow], 2.0, 0.3)]
    record = summarize(runs, ("ttft", "tpot", "itl", "e2el"), (50, 99))
    measured = record["measured"]
    assert record["failed"] == 1 and record["first_failure"] == "gone"
    assert measured["seconds"] == 1.5 and measured["client_cpu_share"] == 0.3
    assert measured["output_tokens_per_second"] == pytest.approx((6 / 1 + 6 / 2) / 2)
    assert measured["tokens_per_second"] == pytest.approx((26 / 1 + 26 / 2) / 2)
    assert measured["requests_per_second"] == pytest.approx((2 / 1 + 2 / 2) / 2)
    assert measured["ttft_mean_ms"] == measured["ttft_p50_ms"] == pytest.approx(200)
    assert measured["ttft_p99_ms"] == pytest.approx(300)
    assert measured["tpot_p50_ms"] == measured["itl_p50_ms"] == pytest.approx(200)
    assert measured["e2el_p50_ms"] == pytest.approx(600)
    assert "ttft_p90_ms" not in measured
    assert "itl_p50_ms" not in summarize(runs, ("ttft",))["measured"]


def test_prefix_hits_are_read_from_any_engine() -> None:
    text = (
        "# TYPE vllm:prefix_cache_hits_total counter\n"
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 10.0\n'
        'vllm:prefix_cache_queries_total{engine="1",model_name="m"} 20.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1.2e+01\n'
        'vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09\n'
        'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 5\n'
    )
    assert cache_counters(text) == {"queries": 30.0, "hits": 12.0}
    assert cache_counters("") == {}


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [
        made_up(0.0, 0.1, 0.2, 0.3),
        made_up(1.0, 1.3, 1.6),
        RequestResult(sent=0.0, error="no"),
    ]
    path = plot_load(results, tmp_path / "plots", "jackfield W5 concurrency 1, requests 2")
    assert path.read_bytes().startswith(b"\x89PNG") and path.parent == tmp_path / "plots"


def test_waits_of_launches_are_read_from_what_the_server_counts() -> None:
    metrics = EngineMetrics("m")
    for wait, times in ((0.0003, 5), (0.03, 1)):
        for _ in range(times):
            metrics.observe_step(1, 0.01, wait)
    metrics.observe_stats(EngineStats(late_preparations=2))
    before = metrics.render().decode()
    for wait, times in ((0.00005, 90), (0.0015, 9), (0.5, 1)):
        for _ in range(times):
            metrics.observe_step(1, 0.01, wait)
    metrics.observe_stats(EngineStats(late_preparations=5))
    after = metrics.render().decode()
    waits = launch_waits(before), launch_waits(after)
    assert quantile(*waits, 0.9) == 0.0001
    assert quantile(*waits, 0.99) == 0.002
    assert quantile(*waits, 0.999) == float("inf")
    assert quantile(waits[1], waits[1], 0.99) is None
    assert (late_preparations(before), late_preparations(after)) == (2, 5)
    assert late_preparations("") is None and not launch_waits("")
