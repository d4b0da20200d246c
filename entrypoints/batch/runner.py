"""Sends lines to the routes, a bounded number at a time, and hands on what became of each."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import EngineStopped
from ...core.tenancy import ANYONE, Tenant
from ..openai.context import encoder
from .lines import Line, Result, answered, refused
from .local import LocalCaller

T = TypeVar("T")
AHEAD = 64
"""Lines read at once, in a thread."""
FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0
"""Seconds before a request that met a full engine is sent again; doubled each time."""
_ABORTED = (b'"finish_reason":"abort"', b'"status":"cancelled"')
"""In the JSON of a chat's or completion's answer, and of a response's. Within a text the quotes
would be escaped."""


class BatchRunner:
    """Sends lines to the routes of one engine.

    `slots` bounds how many are under way, over all the batches that share it. `priority` is put
    into the requests, added to their own: larger goes later, where the policy looks at it.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        caller: LocalCaller,
        slots: asyncio.Semaphore,
        *,
        priority: int = 0,
        tenant: Tenant = ANYONE,
    ) -> None:
        self.engine = engine
        self.caller = caller
        self.slots = slots
        self.priority = priority
        self.tenant = tenant
        self._stopped: EngineStopped | None = None

    async def run(
        self, lines: Iterable[Line], deliver: Callable[[Result], Awaitable[None]]
    ) -> None:
        """Every line's result to `deliver`, as they come. One that fails stops no other.

        Raises EngineStopped, once what was under way is delivered: the rest was not tried.
        """
        try:
            async with asyncio.TaskGroup() as group:
                async for line in in_threads(lines):
                    await self.slots.acquire()
                    if self._stopped is not None:
                        self.slots.release()
                        break
                    group.create_task(self._one(line, deliver))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if self._stopped is not None:
            raise self._stopped

    async def _one(self, line: Line, deliver: Callable[[Result], Awaitable[None]]) -> None:
        try:
            result = await self._result(line)
            # Within its slot: results that cannot be written yet are as many as there are slots.
            await deliver(result)
        except EngineStopped as error:
            self._stopped = error
        finally:
            self.slots.release()

    async def _result(self, line: Line) -> Result:
        if line.error is not None:
            return refused(line, line.error.code, line.error.message)
        body = line.body
        if self.priority:
            own = body.get("priority", 0)
            # What is no number is the route's to refuse.
            if type(own) is int:
                body = {**body, "priority": max(own, 0) + self.priority}
        encoded = encoder.encode(body)
        request_id = uuid.uuid4().hex
        wait = FIRST_WAIT
        while True:
            answer = await self.caller.post(line.url, encoded, self.tenant)
            if answer.status == 503 and b'"overloaded_error"' in answer.body:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                continue
            lost = answer.status >= 500 or any(mark in answer.body for mark in _ABORTED)
            if not self.engine.healthy and (lost or self.engine.dead_reason is not None):
                raise EngineStopped(self.engine.dead_reason or "the engine was stopped")
            return answered(line, answer, request_id)


async def in_threads(items: Iterable[T]) -> AsyncIterator[T]:
    """Items of something that blocks, a few at a time."""
    iterator = iter(items)
    while some := await asyncio.to_thread(_take, iterator):
        for item in some:
            yield item


def _take(iterator: Iterator[T]) -> list[T]:
    return [item for _, item in zip(range(AHEAD), iterator, strict=False)]
