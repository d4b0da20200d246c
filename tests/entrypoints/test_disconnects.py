"""HTTP clients that go away at any moment leave nothing behind in the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator

import aiohttp
import pytest
from serving import MODEL, Server, engine_config, running, save_random

CLIENTS = 400
AT_ONCE = 16
"""Twice the slots: some leave while they wait."""
WAYS = ("read all", "leave mid-stream", "leave mid-stream", "reset before the answer", "give up")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = save_random(tmp_path_factory.mktemp("model"))
    with running(engine_config(checkpoint, device="cpu", block_size=8)) as server:
        yield server


def idle(server: Server) -> bool:
    """Whether no request holds a block, a slot or a place in the queue, soon."""
    return server.becomes(
        lambda engine: (
            engine.stats().kv_blocks_used
            == engine.stats().num_requests_running
            == engine.stats().num_requests_waiting
            == len(engine._states)
            == 0
        )
    )


class Clients:
    """What some clients do; `ended` counts how it went for them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ended: Counter[str] = Counter()
        self.random = random.Random(2)

    def body(self, way: str) -> tuple[str, dict[str, object]]:
        long = way != "read all"
        body: dict[str, object] = {
            "model": MODEL,
            "max_tokens": 400 if long else self.random.randint(1, 12),
            "ignore_eos": True,
            "stream": way != "give up",
            "n": self.random.choice((1, 1, 2)),
            "seed": 1,
        }
        words = "Hello there, how are you today? " * self.random.randint(1, 4)
        if self.random.random() < 0.5:
            return "/v1/completions", {**body, "prompt": words}
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}]}

    async def raw(self, path: str, body: dict[str, object]) -> None:
        """Send a request on a bare socket and reset the connection at once."""
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        await asyncio.sleep(self.random.choice((0, 0.01)))
        writer.transport.abort()

    async def one(self, http: aiohttp.ClientSession) -> None:
        way = self.random.choice(WAYS)
        path, body = self.body(way)
        if way == "reset before the answer":
            await self.raw(path, body)
            self.ended[way] += 1
            return
        timeout = aiohttp.ClientTimeout(total=0.05 if way == "give up" else 60)
        try:
            async with http.post(self.url + path, json=body, timeout=timeout) as answer:
                assert answer.status == 200, await answer.text()
                leave_after = self.random.randint(1, 8)
                last = b""
                async for line in answer.content:
                    if not line.strip():
                        continue
                    last, leave_after = line, leave_after - 1
                    if way == "leave mid-stream" and leave_after == 0:
                        answer.close()
                        self.ended[way] += 1
                        return
                assert way == "read all"
                assert last == b"data: [DONE]\n"
                self.ended[way] += 1
        except TimeoutError:
            assert way == "give up"
            self.ended[way] += 1

    async def all(self) -> None:
        left = iter(range(CLIENTS))

        async def client(http: aiohttp.ClientSession) -> None:
            for _ in left:
                await self.one(http)

        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(client(http) for _ in range(AT_ONCE)))


async def test_clients_that_disconnect_leave_no_request_and_a_healthy_server(
    server: Server,
) -> None:
    clients = Clients(server.url)
    await clients.all()
    assert sum(clients.ended.values()) == CLIENTS
    assert min(clients.ended[way] for way in WAYS) > 20, clients.ended
    assert await asyncio.to_thread(idle, server)
    aborted = server.engine.stats().requests_finished["abort"]
    assert aborted >= clients.ended["leave mid-stream"] + clients.ended["give up"]
    async with aiohttp.ClientSession() as http:
        async with http.get(server.url + "/health") as answer:
            assert answer.status == 200
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        async with http.post(server.url + "/v1/completions", json=body) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == 5
    assert await asyncio.to_thread(server.call, lambda engine: engine.reset_prefix_cache())
