"""Requests that come at once begin a few at a time, so that the engine has a turn in between.

All that has arrived is handled in one turn of the event loop: behind 256 requests the device would
wait for the last one to be read before it is given the next step.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable

from aiohttp import web

from .load import is_for_work

PER_TURN = 4
"""Requests that begin in one turn: some two milliseconds of work."""


class Turnstile:
    """Lets so many through in each turn of the loop, in the order in which they came."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._turning = False

    async def enter(self) -> None:
        """Wait for a place; at once where few come."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self) -> None:
        self._left = self._per_turn
        self._turning = bool(self._waiting)
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():  # Cancelled: its client is gone.
                place.set_result(None)
                self._left -= 1
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)


TURNSTILE: web.AppKey[Turnstile] = web.AppKey("turnstile", Turnstile)


@web.middleware
async def in_turns(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Requests for work wait for their turn."""
    if is_for_work(request):
        await request.app[TURNSTILE].enter()
    return await handler(request)
