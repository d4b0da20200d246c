"""SIGTERM and SIGINT, during the start and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

logger = logging.getLogger("jackfield.server")
START_END_SECONDS = 2.0
"""Seconds for a server to end during its start."""


class StoppedAtStart(Exception):
    """A signal came before the server was up."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} before the server was up")
        self.status = 128 + number
        """Exit status, as in a shell."""


@contextlib.contextmanager
def ending_at_signals() -> Iterator[None]:
    """End at once on SIGINT and SIGTERM until the event loop handles them.

    A KeyboardInterrupt may be lost in an import, and a container's first process gets no unhandled
    signals.
    """

    def end(number: int, _: object) -> None:
        os._exit(128 + number)

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop_signals() -> asyncio.Queue[int]:
    """Return the queue of stop signals from now on."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    return signals


async def unless_stopped(start: Coroutine[Any, Any, None], signals: asyncio.Queue[int]) -> None:
    """Await a start. Raises StoppedAtStart if a signal comes first.

    A thread that loads weights cannot be interrupted, so the process ends START_END_SECONDS after
    the signal.
    """
    starting = asyncio.ensure_future(start)
    stop = asyncio.ensure_future(signals.get())
    try:
        await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        stopped = StoppedAtStart(stop.result())
        logger.warning("%s", stopped)
        limit = threading.Timer(START_END_SECONDS, os._exit, [stopped.status])
        limit.daemon = True
        limit.start()
        raise stopped
    finally:
        starting.cancel()
        stop.cancel()
