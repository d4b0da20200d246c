"""The router of separated prefill: before two real servers, and before servers that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import runpy
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from kv_peers import be_patient, reserved_address, secret_in

import jackfield
from jackfield import AsyncEngine, EngineConfig
from jackfield.entrypoints.server.app import make_app

ROUTER = Path(jackfield.__file__).resolve().parent / "examples/separated_prefill/router.py"
Router: Any = runpy.run_path(str(ROUTER))["Router"]
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me something of everything. " * 8}],
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def engine_with(folder: Path, role: str, **extra: Any) -> AsyncIterator[AsyncEngine]:
    transfer = {
        "kv_connector": "peer_store",
        "kv_role": role,
        "kv_connector_extra_config": {"secret_file": secret_in(folder), "size_gib": 0.1, **extra},
    }
    config = EngineConfig(
        device="cpu", block_size=4, max_model_len=2048, num_gpu_blocks_override=1200,
        kv_transfer_config=transfer,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        yield engine


@contextlib.asynccontextmanager
async def routed(prefill: TestServer | str, decode: TestServer | str) -> AsyncIterator[TestClient]:
    """A client of the router before these servers."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for server in (prefill, decode):
            if isinstance(server, TestServer):
                await stack.enter_async_context(server)
                server = str(server.make_url("")).rstrip("/")
            urls.append(server)
        app = Router([urls[0]], [urls[1]], min_prompt=100).app()
        yield await stack.enter_async_context(TestClient(TestServer(app)))


async def text_of(client: TestClient, **changes: Any) -> str:
    """The content of a streamed chat."""
    text = ""
    body = {**CHAT, "stream": True, **changes}
    async with client.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if data not in ("", "[DONE]"):
                for choice in json.loads(data)["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


async def test_prompts_are_computed_by_one_server_and_outputs_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    where = reserved_address()
    producer = engine_with(tmp_path, "kv_producer", listen=where)
    consumer = engine_with(tmp_path, "kv_consumer", peers=[where])
    async with producer as first, consumer as second:
        prefill, decode = TestServer(make_app(first)), TestServer(make_app(second))
        async with routed(prefill, decode) as client:
            text = await text_of(client)
            stats = second.stats()
            loaded = stats.external_prefix_cache_hits
            assert loaded > 80 and loaded == stats.external_prefix_cache_queries
            assert first.stats().generation_tokens == 1
            # What shapes outputs, and what is added to a stream, reach the decode server alone.
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            answer = await client.post(
                "/v1/chat/completions",
                json={
                    **CHAT, "n": 2, "logprobs": True, "top_logprobs": 1, "stop": ["zz"],
                    "max_completion_tokens": 20, "min_tokens": 2, "tool_choice": "none",
                    "response_format": {
                        "type": "json_schema", "json_schema": {"name": "a", "schema": schema},
                    },
                },
            )  # fmt: skip
            reply = await answer.json()
            assert answer.status == 200 and len(reply["choices"]) == 2, reply
            assert first.stats().generation_tokens == 2
            # A short prompt stays with the decode server, and so does what is no completion.
            await text_of(client, messages=[{"role": "user", "content": "Hi"}])
            assert (await client.get("/v1/models")).status == 200
            assert first.stats().generation_tokens == 2
            wrong = await client.post("/v1/chat/completions", json={**CHAT, "temperature": "hot"})
            assert wrong.status == 400 and "temperature" in await wrong.text()

            async with client.post(
                "/v1/chat/completions", json={**CHAT, "max_tokens": 1500, "stream": True}
            ) as answer:
                await answer.content.readline()
            async with asyncio.timeout(300):
                while second.stats().num_requests_running:
                    await asyncio.sleep(0.001)
            assert second.stats().generation_tokens < 1500
        # Without the prefill server: the same text.
        decode = TestServer(make_app(second))
        async with routed(f"http://{reserved_address()}", decode) as client:
            assert await text_of(client) == text


def server_of(handler: Handler) -> TestServer:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    return TestServer(app)


@pytest.mark.parametrize("failure", ["refuses", "says nothing of use", "ends"])
async def test_a_prefill_server_that_fails_is_done_without(failure: str) -> None:
    seen: list[dict[str, Any]] = []

    async def prefill(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["max_tokens"] == 1 and body["stream"] is False and "n" not in body
        assert body["kv_transfer_params"] == {"do_remote_decode": True}
        if failure == "ends":
            assert request.transport is not None
            request.transport.close()
        if failure == "refuses":
            return web.json_response({"error": {}}, status=503)
        return web.Response(text="{", content_type="application/json")

    async def decode(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return web.json_response({"at": request.path_qs}, headers={"X-Request-Id": "5"})

    async with routed(server_of(prefill), server_of(decode)) as client:
        answer = await client.post("/v1/chat/completions?a=%20b", json={**CHAT, "n": 2})
        assert await answer.json() == {"at": "/v1/chat/completions?a=%20b"}
        assert answer.headers["X-Request-Id"] == "5"
    assert seen == [{**CHAT, "n": 2}]


async def test_a_client_that_leaves_ends_its_prompt() -> None:
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def prefill(request: web.Request) -> web.StreamResponse:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("it waits for ever")

    async def decode(request: web.Request) -> web.StreamResponse:
        raise AssertionError("nobody is there for an answer")

    async with routed(server_of(prefill), server_of(decode)) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        async with asyncio.timeout(300):
            await arrived.wait()
            asking.cancel()
            await ended.wait()


async def test_a_decode_server_that_is_not_there_is_an_error_of_the_gateway() -> None:
    where = f"http://{reserved_address()}"
    async with routed(where, where) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status == 502 and (await answer.json())["error"]["code"] == 502
