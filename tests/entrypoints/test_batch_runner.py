"""What the runner of batches makes of an engine that stops under it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from serving import engine_config, save_random

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import EngineStopped, RateLimited
from jackfield.core.registry import Plugins
from jackfield.core.tenancy import ANYONE, Tenant, TenantLimits
from jackfield.entrypoints.batch.inprocess import LINES, call_route
from jackfield.entrypoints.batch.jsonl import LineReader, Result
from jackfield.entrypoints.batch.runner import BatchRunner
from jackfield.entrypoints.http.auth.usage import USAGE, Usage
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.http.routing import ROUTES
from jackfield.entrypoints.openai.pooling.protocol import PoolingRequest
from jackfield.entrypoints.server.app import make_app

LONG = {"ignore_eos": True, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hello", "max_output_tokens": 400, **LONG},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400, **LONG,
    },
    "/v1/completions": {"prompt": "Hello", "max_tokens": 400, **LONG},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("url", BODIES)
async def test_requests_that_a_stop_cut_off_have_no_result(
    url: str, checkpoint: Path, tmp_path: Path
) -> None:
    """So that they are asked again when the batch goes on."""
    short = {"max_output_tokens" if url == "/v1/responses" else "max_tokens": 2}
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(
            json.dumps({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}) + "\n"
            for n, body in enumerate([{**BODIES[url], **short}] + [BODIES[url]] * 5)
        )
    )
    delivered: list[dict[str, Any]] = []

    async with AsyncEngine(engine_config(checkpoint, device="cpu", max_num_seqs=4)) as engine:
        done = asyncio.Event()

        async def deliver(result: Result) -> None:
            delivered.append(json.loads(result.encoded))
            done.set()

        app = make_app(engine)
        server = web.AppRunner(app)
        await server.setup()
        runner = BatchRunner(app, asyncio.Semaphore(3))
        lines = LineReader(path, tuple(LINES), 1 << 20)
        running = asyncio.create_task(runner.run(lines, deliver))
        await done.wait()
        while engine.stats().num_requests_running < 2:
            await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineStopped):
            await running
        await server.cleanup()
    (line,) = delivered
    assert line["custom_id"] == "r0" and line["response"]["status_code"] == 200


async def test_a_batch_that_waits_for_its_tenant_s_limits_leaves_the_slots_to_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    body = {"prompt": "Hello", "max_tokens": 1}
    url = "/v1/completions"
    lines = [{"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    busy = Tenant("busy", "busy", TenantLimits(max_concurrency=1))
    delivered: list[str] = []
    async with AsyncEngine(engine_config(checkpoint, device="cpu")) as engine:
        app = make_app(engine)
        server = web.AppRunner(app)
        await server.setup()
        slots = asyncio.Semaphore(1)
        app[USAGE].begin(busy)

        def start(tenant: Tenant) -> asyncio.Task[None]:
            async def deliver(result: Result) -> None:
                delivered.append(tenant.name)
                if tenant is busy:  # Its one place is taken by this line.
                    with pytest.raises(RateLimited):
                        app[USAGE].begin(busy)

            runner = BatchRunner(app, slots, tenant=tenant)
            return asyncio.create_task(runner.run(LineReader(path, (url,), 1 << 20), deliver))

        waiting = start(busy)
        await start(ANYONE)
        assert delivered == [""] * 3 and not waiting.done()
        app[USAGE].end(busy)
        await waiting
        assert delivered == [""] * 3 + ["busy"] * 3
        app[USAGE].begin(busy)  # Nothing is left counted.
        await server.cleanup()


async def test_a_batch_whose_tenant_cannot_be_counted_leaves_no_slot_taken(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    url = "/v1/completions"
    path.write_text(json.dumps({"custom_id": "0", "method": "POST", "url": url, "body": {}}) + "\n")
    counted = Tenant("counted", "counted", TenantLimits(max_concurrency=1))

    async def deliver(result: Result) -> None:
        raise AssertionError("no line begins")

    async with AsyncEngine(engine_config(checkpoint, device="cpu")) as engine:
        slots = asyncio.Semaphore(1)
        runner = BatchRunner(make_app(engine), slots, tenant=counted)
        runner.usage = Usage(2, 0, tmp_path / "usage")
        runner.usage.close()  # As if its file had gone.
        with pytest.raises(ValueError):
            await runner.run(LineReader(path, (url,), 1 << 20), deliver)
        assert not slots.locked()


def test_lines_may_name_each_inference_route_of_openais_api() -> None:
    ollama = {f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings")}
    forms = {f"/v1/audio/{name}" for name in ("transcriptions", "translations")}
    others = {"/v1/messages", "/v2/embed", "/invocations", *ollama, *forms}
    app = make_app(AsyncEngine(EngineConfig(), plugins=Plugins()))
    inference = {path for (_, path), route in app[ROUTES].served.items() if route.inference}
    assert {*LINES, *others} == inference


async def test_a_line_gets_the_response_of_the_server(checkpoint: Path) -> None:
    """Statuses and bodies, of refusals too."""
    chat, complete = "/v1/chat/completions", "/v1/completions"
    short = {"max_tokens": 4, "temperature": 0, "request_id": "one"}
    bodies: list[tuple[str, Any]] = [
        (chat, {"messages": [{"role": "user", "content": "Hello"}], **short}),
        (complete, {"prompt": ["Hello", "The"], "n": 2, "logprobs": 1, **short}),
        (complete, {"prompt": "Hello", "temperature": "warm"}),
        (complete, {"prompt": "Hello", "model": "another"}),
        (complete, {"prompt": "Hello", "priority": 3}),
        (complete, {"prompt": "Hello", "n": 2000}),
        (chat, {"messages": [], "n": 0}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "Hello", "previous_response_id": "resp_none"}),
        (complete, {"prompt": "x" * 5000}),
    ]
    options = ServerOptions(max_body_bytes=4000)
    async with AsyncEngine(engine_config(checkpoint, device="cpu")) as engine:
        async with TestClient(TestServer(make_app(engine, options))) as client:
            for route, body in bodies:
                raw = json.dumps(body).encode()
                line = await call_route(client.app, route, raw)
                direct = await client.post(
                    route, data=raw, headers={"Content-Type": "application/json"}
                )
                assert line.status == direct.status, (route, body)
                expected, response = await direct.json(), json.loads(line.body)
                if line.status == 413:  # aiohttp words it.
                    expected["error"]["message"] = response["error"]["message"]
                if line.status == 200:
                    expected["created"] = response["created"]
                assert response == expected


async def test_an_error_of_the_server_stays_in_its_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncEngine(engine_config(checkpoint, device="cpu")) as engine:
        app = make_app(engine)

        async def broken(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setitem(LINES, "/pooling", (PoolingRequest, broken))
        response = await call_route(app, "/pooling", b'{"input": "a"}')
    assert response.status == 500
    assert json.loads(response.body)["error"]["message"] == "the server failed on this request"
