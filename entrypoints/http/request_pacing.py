"""Spreads simultaneous requests over turns of the event loop, so that the engine runs in between.

Otherwise 256 requests would be handled in one turn, while the device waits.
"""

from __future__ import annotations

import asyncio
import collections

from aiohttp import web

from .routing import Handler, traits_of

PER_TURN = 4
"""Requests started per turn: about two milliseconds."""


class RequestPacer:
    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._turning = False

    async def enter(self) -> None:
        """Wait for a place; immediate for few requests."""
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
            if not place.done():  # If cancelled, its client has disconnected.
                place.set_result(None)
                self._left -= 1
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)


PACER: web.AppKey[RequestPacer] = web.AppKey("request_pacer", RequestPacer)


@web.middleware
async def pace_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    if traits_of(request).inference:
        await request.app[PACER].enter()
    return await handler(request)
