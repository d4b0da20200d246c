"""Counts tenants' requests against their limits: concurrency, and requests per minute.

Counted are requests that do work: those that the middleware passes, lines of batches, and
background responses until they end.

All front ends share a table: a mapped file in their private folder, or plain memory in one process.
Each front end clears its column of running requests at its start, so a killed process leaves no
counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aiohttp import web

from ....core.errors import RateLimited
from ....core.tenancy import Tenant
from ..routing import Handler, traits_of
from .tenants import route_of, tenant_of

WORKING_METHODS = frozenset({"POST", "PUT", "PATCH"})
NUM_ROWS = 4096
"""Most tenants with limits counted at once."""
NEAR = 32
"""Rows that may hold a tenant, from the row of its digest."""
_HEAD = struct.Struct("<16sdd")
"""Digest of the owner; requests that may start now; time of that number."""


class Usage:
    """Counts of tenants with limits, shared by `num_fronts` processes."""

    def __init__(
        self,
        num_fronts: int = 1,
        front: int = 0,
        path: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """front: index of this process. path: the shared file; None for one process."""
        self._front = front
        self._running = struct.Struct(f"<{num_fronts}I")
        self._row = _HEAD.size + self._running.size
        self._clock = clock
        size = self._row * NUM_ROWS
        self._file = None
        self._table: mmap.mmap | bytearray = bytearray(size)
        if path is not None:
            self._file = path.open("a+b")
            with self._locked():
                self._file.truncate(size)
            self._table = mmap.mmap(self._file.fileno(), size)
            with self._locked():
                for row in range(NUM_ROWS):
                    struct.pack_into("<I", self._table, self._cell(row), 0)

    def close(self) -> None:
        if isinstance(self._table, mmap.mmap):
            self._table.close()
        if self._file is not None:
            self._file.close()

    def begin(self, tenant: Tenant) -> None:
        """Count a tenant's request. Raises RateLimited without counting it."""
        limits, now = tenant.limits, self._clock()
        if not limits.counts_requests:
            return
        with self._locked():
            row = self._find(tenant, now)
            at = row * self._row
            digest, tokens, since = _HEAD.unpack_from(self._table, at)
            running = sum(self._running.unpack_from(self._table, at + _HEAD.size))
            if limits.max_concurrency is not None and running >= limits.max_concurrency:
                raise RateLimited(
                    f"{tenant.name}: {limits.max_concurrency} requests are being answered; "
                    "try again when one has ended"
                )
            if (rate := limits.requests_per_minute) is not None:
                tokens = min(float(rate), tokens + max(now - since, 0.0) * rate / 60)
                if tokens < 1:
                    if now < since:  # The clock was set back; the bucket refills from here on.
                        _HEAD.pack_into(self._table, at, digest, tokens, now)
                    error = RateLimited(f"{tenant.name}: {rate} requests per minute are allowed")
                    error.retry_after = max(1, round((1 - tokens) * 60 / rate + 0.5))
                    raise error
                tokens -= 1
            _HEAD.pack_into(self._table, at, digest, tokens, now)
            self._add(row, 1)

    def hold(self, tenant: Tenant) -> None:
        """Count work that outlives a counted request, until its own `end`. Never refuses."""
        if tenant.limits.counts_requests:
            with self._locked():
                self._add(self._find(tenant, self._clock()), 1)

    def end(self, tenant: Tenant) -> None:
        if tenant.limits.counts_requests:
            with self._locked():
                self._add(self._find(tenant, self._clock()), -1)

    def _add(self, row: int, change: int) -> None:
        (count,) = struct.unpack_from("<I", self._table, self._cell(row))
        struct.pack_into("<I", self._table, self._cell(row), max(count + change, 0))

    def _cell(self, row: int) -> int:
        return row * self._row + _HEAD.size + 4 * self._front

    def _find(self, tenant: Tenant, now: float) -> int:
        """Return a tenant's row: its own, a free one nearby, or the longest idle. Raises
        RateLimited if all rows are in use.
        """
        digest = hashlib.blake2b(tenant.owner.encode(), digest_size=16).digest()
        first = int.from_bytes(digest[:4], "little")
        oldest: tuple[float, int] | None = None
        for step in range(NEAR):
            row = (first + step) % NUM_ROWS
            at = row * self._row
            present, _, since = _HEAD.unpack_from(self._table, at)
            if present == digest:
                return row
            if not any(self._running.unpack_from(self._table, at + _HEAD.size)) and (
                oldest is None or since < oldest[0]
            ):
                oldest = (since, row)
        if oldest is None:
            raise RateLimited("too many keys with limits are in use; try again later")
        full = float(tenant.limits.requests_per_minute or 0)
        _HEAD.pack_into(self._table, oldest[1] * self._row, digest, full, now)
        return oldest[1]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the table against other processes; must not await."""
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


USAGE: web.AppKey[Usage] = web.AppKey("usage", Usage)


def does_work(request: web.Request) -> bool:
    """Return whether a request counts against limits; plugins' routes do, and those that end work
    do not."""
    return (
        request.method in WORKING_METHODS
        and bool(route_of(request))
        and not traits_of(request).ends_work
    )


@web.middleware
async def within_limits(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count requests of tenants with limits, streams until they end."""
    if not does_work(request):
        return await handler(request)
    usage, tenant = request.app[USAGE], tenant_of(request)
    usage.begin(tenant)
    try:
        return await handler(request)
    finally:
        usage.end(tenant)
