"""What a front end asks of its engine, by number, and the answers that it waits for."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import EngineStopped, InvalidRequest
from .channel import Channel
from .frames import Answer, Ask, Refused, ToEngine, ToFront


class Questions:
    """Numbers rise for as long as the connection lasts: each question has one, each completion of a
    request one of its own."""

    def __init__(self, channel: Channel[ToFront]) -> None:
        self._channel = channel
        self._last = -1
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def numbers(self, count: int = 1) -> int:
        """→ the first of so many new ones."""
        first = self._last + 1
        self._last += count
        return first

    def send(self, message: ToEngine) -> None:
        """Raises InvalidRequest for what cannot be said in a frame."""
        try:
            self._channel.send(message)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    async def ask(self, what: str) -> Any:
        """→ the answer. Raises as `answer` does."""
        number = self.numbers()
        return await self.answer(number, Ask(number, what))

    async def answer(self, number: int, question: ToEngine) -> Any:
        """Send, and wait. Raises what the engine raises, and EngineStopped when it is gone."""
        if self._channel.closed:
            raise EngineStopped("the engine is not running")
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(question)
            return await future
        finally:
            self._waiting.pop(number, None)

    def settle(self, message: Answer | Refused) -> None:
        """One of those that somebody waits for, or waited for."""
        future = self._waiting.pop(message.number, None)
        if future is None or future.done():
            return
        if isinstance(message, Answer):
            future.set_result(message.value)
        else:
            future.set_exception(message.error())

    def fail(self, reason: str) -> None:
        """No answer will come."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(EngineStopped(reason))
