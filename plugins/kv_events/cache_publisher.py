"""Publishes cache events over ZeroMQ, as vLLM 0.33 does: one batch a step, numbered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ...core.cache.events import CacheEvent, KVCacheInfo
from ...core.errors import ConfigError
from ...core.hooks import hookimpl
from .endpoints import LOOPBACK, is_bound, of_member
from .options import PARAM, KVEventsOptions
from .wire import WireForm

logger = logging.getLogger("jackfield.plugins")
MAX_REPLAY_BYTES = 64 << 20
MAX_REQUEST_BYTES = 1024
"""Of a request to repeat batches; a peer that sends more is disconnected."""
REPLIES_AT_ONCE = 256
"""Batches that are repeated before the event loop goes round."""
END = (-1).to_bytes(8, "big", signed=True)
"""Number of the message behind the last repeated batch."""


class CachePublisher:
    """The hooks that publish the cache of this process' engine."""

    def __init__(self, options: KVEventsOptions) -> None:
        self._options = options
        # Wrong addresses are refused before a model is loaded.
        of_member(options.endpoint or LOOPBACK, 0, "endpoint")
        if options.replay_endpoint is not None:
            of_member(options.replay_endpoint, 0, "replay_endpoint")
        self._socket: EventSocket | None = None
        self._form: WireForm | None = None

    @hookimpl
    def kv_cache_started(self, cache: KVCacheInfo) -> None:
        """Open the sockets. Raises ConfigError for an address that cannot be used."""
        if not cache.enable_prefix_caching:
            raise ConfigError(
                f"{PARAM}.enable_kv_cache_events: without enable_prefix_caching, no block is found "
                "by a later request",
                param=f"{PARAM}.enable_kv_cache_events",
            )
        self._form = WireForm(cache, int_block_hashes=self._options.int_block_hashes)
        self._socket = EventSocket(self._options, cache.member)

    @hookimpl
    def kv_cache_changed(self, events: Sequence[CacheEvent]) -> None:
        if self._socket is not None and self._form is not None:
            self._socket.send(self._form.batch(time.time(), events))

    @hookimpl
    async def engine_stopping(self, engine: Any) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()


class EventSocket:
    """A PUB socket for numbered batches, and perhaps a ROUTER socket that repeats them."""

    def __init__(self, options: KVEventsOptions, member: int) -> None:
        """Open the sockets, on a running event loop. Raises ConfigError."""
        self._topic = options.topic.encode()
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=options.buffer_steps)
        """Numbers and payloads, for replays."""
        self._kept_bytes = 0
        self._pub = zmq.Context().socket(zmq.PUB)
        self._router: zmq.asyncio.Socket | None = None
        self._replays: asyncio.Task[None] | None = None
        try:
            self._open(options, member)
        except BaseException:
            self._close_sockets()
            raise

    def _open(self, options: KVEventsOptions, member: int) -> None:
        self._pub.setsockopt(zmq.SNDHWM, options.hwm)
        endpoint = of_member(options.endpoint or LOOPBACK, member, "endpoint")
        if is_bound(endpoint) or not options.endpoint:
            _bind(self._pub, endpoint, "endpoint")
        else:
            self._pub.connect(endpoint)
        logger.info(
            "KV events of engine %d: %s", member, self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        )
        if options.replay_endpoint is None:
            return
        router = self._router = zmq.asyncio.Context().socket(zmq.ROUTER)
        # A reader's replay and its end fit, though it says late what it has read.
        router.setsockopt(zmq.SNDHWM, 2 * (options.buffer_steps + 1))
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        router.copy_threshold = 0  # What waits for a reader is what is kept, not a copy.
        _bind(router, of_member(options.replay_endpoint, member, "replay_endpoint"),
              "replay_endpoint")  # fmt: skip
        self._replays = asyncio.get_running_loop().create_task(self._answer(router))

    def send(self, batch: object) -> None:
        """Publish a batch: it waits for slow readers, up to `hwm`, and not for others."""
        number, payload = self._number.to_bytes(8, "big"), self._encoder.encode(batch)
        self._number += 1
        self._pub.send_multipart((self._topic, number, payload), flags=zmq.NOBLOCK)
        if self._replays is not None:
            self._keep(number, payload)

    def _keep(self, number: bytes, payload: bytes) -> None:
        kept = self._kept
        if len(kept) == kept.maxlen:
            self._kept_bytes -= len(kept.popleft()[1])
        kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > MAX_REPLAY_BYTES:
            self._kept_bytes -= len(kept.popleft()[1])

    async def _answer(self, router: zmq.asyncio.Socket) -> None:
        """Repeat batches from the number on that a reader asks for, one reader after the other."""
        while True:
            try:
                frames = await router.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == 8:
                    await self._repeat(router, frames[0], frames[2])
                else:
                    logger.debug("no request for KV events: %d frames", len(frames))
            except zmq.ZMQError as error:
                logger.warning("KV events could not be repeated: %s", error)
                await asyncio.sleep(0.1)

    async def _repeat(self, router: zmq.asyncio.Socket, reader: bytes, first: bytes) -> None:
        batches = [batch for batch in self._kept if batch[0] >= first]
        for count, (number, payload) in enumerate(batches, 1):
            message = (reader, b"", self._topic, number, payload)
            await router.send_multipart(message, copy=False)
            if count % REPLIES_AT_ONCE == 0:
                await asyncio.sleep(0)
        await router.send_multipart((reader, b"", b"", END, b""))

    async def close(self) -> None:
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
                socket.context.term()


def _bind(socket: Any, endpoint: str, field: str) -> None:
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{PARAM}.{field}: {endpoint} cannot be bound: {error}", param=f"{PARAM}.{field}"
        ) from None
