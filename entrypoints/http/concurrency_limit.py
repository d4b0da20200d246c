"""Limits requests in flight, and those that wait for the engine."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from ...core.errors import EngineOverloaded
from ...core.outputs import EngineStats
from .context import ENGINE
from .routing import Handler, traits_of

MIN_WAITING = 128
"""Fewest requests that may wait by default."""
WAITING_SHARE = 2
"""Waiting requests per runnable one by default: about half of a request's duration."""
FULL_CACHE = 0.9
"""Used share of the KV cache beyond which no more requests can run."""


def limit_concurrency(count: int) -> Middleware:
    """Return a middleware that refuses requests beyond `count`.

    Streams count until they end; keyless routes do not count.
    """
    running = 0

    @web.middleware
    async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal running
        if traits_of(request).keyless:
            return await handler(request)
        if running >= count:
            raise EngineOverloaded(f"{count} requests are being answered; try again later")
        running += 1
        try:
            return await handler(request)
        finally:
            running -= 1

    return limited


def num_runnable(stats: EngineStats) -> int:
    """Return how many requests can run, given the KV cache's use."""
    full = stats.kv_cache_usage > FULL_CACHE
    return stats.num_requests_running if full else stats.num_slots


def waiting_limit(num_runnable: int) -> int:
    return max(MIN_WAITING, num_runnable // WAITING_SHARE)


def limit_waiting(count: int | None, num_batched: int = 0) -> Middleware:
    """Return a middleware that refuses inference requests while `count` wait for the engine; None:
    `waiting_limit`. num_batched: batches' requests, which may wait besides.

    A request is accepted or refused whole. Without a limit, an overloaded queue grows and all
    requests are late; a refused client can go elsewhere.
    """
    in_flight = 0

    @web.middleware
    async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal in_flight
        if not traits_of(request).inference:
            return await handler(request)
        engine = request.app[ENGINE]
        stats = engine.stats()
        runnable, present = num_runnable(stats), in_flight
        # A pooling request may be thousands of inputs that take no time: it counts as one.
        if engine.supported_tasks == ("generate",):
            in_engine = stats.num_requests_waiting + stats.num_requests_running
            # The engine may not know yet of all that have arrived.
            present = max(present, in_engine - num_batched)
        most = waiting_limit(runnable) if count is None else count
        if present - runnable >= most:
            raise EngineOverloaded(f"{most} requests are waiting already; try again later")
        in_flight += 1
        try:
            return await handler(request)
        finally:
            in_flight -= 1

    return limited
