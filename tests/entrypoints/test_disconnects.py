"""Clients that vanish in the middle of a stream leave nothing behind on the server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from serving import MODEL, Server, engine_config, running

from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.openai.completions.routes import merge


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """On the embedded model."""
    with running(engine_config(EMBEDDED_MODEL)) as item:
        yield item


async def reset(url: str, body: dict[str, Any]) -> None:
    """Send a request on a bare socket and reset the connection before a byte of the answer."""
    host, _, rest = url.removeprefix("http://").partition(":")
    port, _, path = rest.partition("/")
    _, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    writer.transport.abort()


async def vanish(session: aiohttp.ClientSession, url: str, number: int) -> str:
    """Ask, and leave at some point. → when"""
    draw = random.Random(number)
    when = draw.choice(["at once", "before the answer", "after some of it", "after all of it"])
    stream = draw.random() < 0.7
    words = "word " * draw.randrange(1, 30)
    chat = draw.random() < 0.5
    url += "/chat/completions" if chat else "/completions"
    prompt = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    body: dict[str, Any] = {
        "model": MODEL, **prompt, "ignore_eos": True,
        "max_tokens": 60 if when != "after all of it" else 4, "stream": stream,
        "n": draw.choice([1, 1, 2]),
    }  # fmt: skip
    if when == "at once":
        await reset(url, body)
        return when
    if when == "before the answer":
        timeout = aiohttp.ClientTimeout(total=0.01 + 0.05 * draw.random())
        try:
            async with session.post(url, json=body, timeout=timeout) as response:
                await response.read()
        except (TimeoutError, aiohttp.ClientError):
            pass
        return when
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        if when == "after all of it":
            assert await response.read()
        elif stream:
            for _ in range(draw.randrange(1, 5)):
                await response.content.readline()
            response.close()
    return when


@pytest.mark.parametrize("clients", [80, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_clients_that_vanish(server: Server, clients: int) -> None:
    before = server.engine.stats().requests_finished.get("abort", 0)
    connector = aiohttp.TCPConnector(limit=32, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        url = f"{server.url}/v1"
        whens = await asyncio.gather(*(vanish(session, url, n) for n in range(clients)))
        assert len(set(whens)) == 4
        until = time.monotonic() + 300
        while (stats := server.engine.stats()).num_requests_running + stats.num_requests_waiting:
            assert time.monotonic() < until, f"still at work: {stats}"
            await asyncio.sleep(0.05)
        assert server.engine.stats().kv_blocks_used == 0
        aborted = server.engine.stats().requests_finished.get("abort", 0) - before
        assert aborted > clients / 10
        async with session.get(f"{server.url}/health") as response:
            assert response.status == 200
        body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        async with session.post(f"{url}/completions", json=body) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 3


async def test_streams_of_several_prompts_end_at_once_when_nobody_reads_them() -> None:
    ended = []

    async def outputs(number: int) -> AsyncIterator[int]:
        try:
            yield number
            await asyncio.Event().wait()  # The model is at work.
        finally:
            ended.append(number)

    merged = merge([outputs(number) for number in range(3)])
    assert sorted([await anext(merged) for _ in range(3)]) == [(0, 0), (1, 1), (2, 2)]
    async with asyncio.timeout(300):
        await merged.aclose()
    assert sorted(ended) == [0, 1, 2]
