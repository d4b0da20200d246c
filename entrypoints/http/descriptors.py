"""Descriptors of this process: how many it may open, and whether any is left."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger("jackfield.http")
RESERVED = 256
"""Descriptors for files, models, and processes' sockets."""
MOST_DESCRIPTORS = 65_536
"""Highest value to which the soft limit is raised."""
PROBE_SECONDS = 1.0
"""Seconds between checks for free descriptors."""
REPEAT_SECONDS = 10.0
"""Period in which a frequent warning is logged once."""


class RepeatedWarning:
    """Logs a warning once per REPEAT_SECONDS, with its count."""

    def __init__(self) -> None:
        self._count = 0
        self._next = 0.0

    def warn(self, message: str) -> None:
        self._count += 1
        now = time.monotonic()
        if now >= self._next:
            times = f" ({self._count} times)" if self._count > 1 else ""
            logger.warning("%s%s", message, times)
            self._next, self._count = now + REPEAT_SECONDS, 0


def raise_descriptors() -> int:
    """Raise the soft limit of open descriptors; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def max_connections() -> int:
    """Return how many connections the descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = MOST_DESCRIPTORS
    return max(soft - RESERVED, soft // 2)


@asynccontextmanager
async def watching_descriptors() -> AsyncIterator[None]:
    """Log, at intervals, a lack of descriptors.

    Neither event loop reports it.
    """
    task = asyncio.create_task(_watch_descriptors())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _watch_descriptors() -> None:
    warning = RepeatedWarning()
    while True:
        if not descriptors_left():
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            warning.warn(
                f"connections are refused: this process has no descriptor left (its limit is "
                f"{soft}; raise it with ulimit -n, or lower --max-connections)"
            )
        await asyncio.sleep(PROBE_SECONDS)


def descriptors_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
