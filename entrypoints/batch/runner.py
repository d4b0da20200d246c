"""Sends lines to the routes, a bounded number at a time."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from aiohttp import web

from ...core.errors import EngineStopped, RateLimited
from ...core.tenancy import ANYONE, Tenant
from ..http.auth.usage import USAGE
from ..http.context import ENGINE, encoder
from .inprocess import call_route
from .jsonl import Line, Result, answered, refused

T = TypeVar("T")
AHEAD = 64
"""Lines read at once by a thread."""
FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0
"""Seconds before a request is sent again after the engine was full; doubles each time."""
_ABORTED = (b'"finish_reason":"abort"', b'"status":"cancelled"')
"""Mark aborted requests in the JSON of completions and responses. In generated texts the quotes
would be escaped."""


class BatchRunner:
    """Sends lines to one engine's routes.

    `slots` bounds those in flight over all batches. `priority` is added to the requests' own.
    """

    def __init__(
        self,
        app: web.Application,
        slots: asyncio.Semaphore,
        *,
        priority: int = 0,
        tenant: Tenant = ANYONE,
    ) -> None:
        self.app = app
        self.engine = app[ENGINE]
        self.slots = slots
        self.priority = priority
        self.tenant = tenant
        self.usage = app[USAGE]
        self._ended = asyncio.Event()
        """Set when a line has ended, which may free the tenant's limits."""
        self._stopped: EngineStopped | None = None

    async def run(
        self, lines: Iterable[Line], deliver: Callable[[Result], Awaitable[None]]
    ) -> None:
        """Send each line and pass its result to `deliver`, in order of completion. Failed lines do
        not stop others.

        Raises EngineStopped after delivering what was in flight.
        """
        try:
            async with asyncio.TaskGroup() as group:
                async for line in in_threads(lines):
                    await self._begin()
                    if self._stopped is not None:
                        self._end()
                        break
                    group.create_task(self._one(line, deliver))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if self._stopped is not None:
            raise self._stopped

    async def _one(self, line: Line, deliver: Callable[[Result], Awaitable[None]]) -> None:
        try:
            result = await self._result(line)
            # Within its slot, so that at most one undelivered result per slot is kept.
            await deliver(result)
        except EngineStopped as error:
            self._stopped = error
        finally:
            self._end()

    async def _begin(self) -> None:
        """Wait for a slot and the tenant's limits, releasing the slot while those refuse."""
        while True:
            await self.slots.acquire()
            try:
                return self.usage.begin(self.tenant)
            except RateLimited as error:
                self.slots.release()
                self._ended.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), error.retry_after)
            except BaseException:
                self.slots.release()
                raise

    def _end(self) -> None:
        self.usage.end(self.tenant)
        self.slots.release()
        self._ended.set()

    async def _result(self, line: Line) -> Result:
        if line.error is not None:
            return refused(line, line.error.code, line.error.message)
        body = line.body
        if self.priority:
            own = body.get("priority", 0)
            # If it is not a number, the route refuses it.
            if type(own) is int:
                body = {**body, "priority": max(own, 0) + self.priority}
        payload = encoder.encode(body)
        request_id = uuid.uuid4().hex
        wait = FIRST_WAIT
        while True:
            response = await call_route(self.app, line.url, payload, self.tenant)
            if response.status == 503 and b'"overloaded_error"' in response.body:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
                continue
            lost = response.status >= 500 or any(mark in response.body for mark in _ABORTED)
            if not self.engine.healthy and (lost or self.engine.dead_reason is not None):
                raise EngineStopped(self.engine.dead_reason or "the engine was stopped")
            return answered(line, response, request_id)


async def in_threads(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield a blocking iterable's items, reading a few at a time in a thread."""
    iterator = iter(items)
    while some := await asyncio.to_thread(_take, iterator):
        for item in some:
            yield item


def _take(iterator: Iterator[T]) -> list[T]:
    return [item for _, item in zip(range(AHEAD), iterator, strict=False)]
