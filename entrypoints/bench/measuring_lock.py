"""A file lock that makes processes measure one after the other on a shared device."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import AsyncIterator, Iterator

POLL_SECONDS = 0.02
HELP = (
    "hold this file's lock (flock) while measuring, and wait for it once the engine is ready: "
    "processes that share the file may start side by side, and measure one after the other"
)


@contextlib.contextmanager
def held(path: str | None) -> Iterator[None]:
    """Hold a file's lock, creating the file; None: no lock.

    Raises OSError if it cannot be opened.
    """
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.asynccontextmanager
async def held_async(path: str | None) -> AsyncIterator[None]:
    """As `held`, for an event loop."""
    if path is None:
        yield
        return
    with open(path, "a") as file:  # noqa: ASYNC230
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_SECONDS)
        yield
