"""Calls of a front end that wait for the engine's reply, by number."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from ..errors import EngineStopped, InvalidRequest
from ..live.engine_jobs import LiveJob
from ..lora_request import AdapterCard, AdapterJob
from .channel import Channel
from .frames import AdapterQuery, ErrorReply, LiveQuery, Query, Reply, ToEngine, ToFront


class PendingCalls:
    """Numbers calls, and matches replies.

    Numbers increase over the connection, one per Query or completion.
    """

    def __init__(self, channel: Channel[ToFront]) -> None:
        self._channel = channel
        self._last = -1
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def numbers(self, count: int = 1) -> int:
        """Return the first of `count` new numbers."""
        first = self._last + 1
        self._last += count
        return first

    def send(self, message: ToEngine) -> None:
        """Raises InvalidRequest if it cannot be encoded."""
        try:
            self._channel.send(message)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    async def query(self, name: str) -> Any:
        """Return a Query's reply. Raises as `call`."""
        number = self.numbers()
        return await self.call(number, Query(number, name))

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Return the cards of a job about adapters. Raises as `call` does."""
        number = self.numbers()
        reply = await self.call(number, AdapterQuery(number, job))
        return msgspec.msgpack.decode(reply, type=list[AdapterCard])

    async def ask_live(self, job: LiveJob) -> dict[str, Any]:
        """Return the answer of a job. Raises as `call` does."""
        number = self.numbers()
        reply = await self.call(number, LiveQuery(number, job))
        return msgspec.msgpack.decode(reply, type=dict[str, Any])

    async def call(self, number: int, message: ToEngine) -> Any:
        """Return a message's reply. Raises the engine's error, or EngineStopped."""
        return await self.begin(number, message)

    def begin(self, number: int, message: ToEngine) -> asyncio.Future[Any]:
        """Send a message; return its reply's future. Raises EngineStopped, and InvalidRequest if it
        cannot be encoded.
        """
        if self._channel.closed:
            raise EngineStopped("the engine is not running")
        self.send(message)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return future

    def settle(self, message: Reply | ErrorReply) -> None:
        """Resolve a reply's call, unless cancelled."""
        future = self._waiting.get(message.number)
        if future is None or future.done():
            return
        if isinstance(message, Reply):
            future.set_result(message.value)
        else:
            future.set_exception(message.error())

    def fail(self, reason: str) -> None:
        """End all calls with EngineStopped."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(EngineStopped(reason))
