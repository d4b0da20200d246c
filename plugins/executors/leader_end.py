"""Ends rank 0, whose thread may be blocked in a library by lost ranks. Imports nothing large."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import logging
import os
import threading
from typing import TYPE_CHECKING

from ...core.worker.threads import WorkerThread
from .awaited import retrieve, set_once

if TYPE_CHECKING:
    from .rank import RankWorker

logger = logging.getLogger("jackfield.worker")
END_SECONDS = 5.0
"""Seconds for a rank to end before it is killed."""


async def end_thread(
    thread: WorkerThread, ended: asyncio.Future[None], joined: RankWorker | None, seconds: float
) -> None:
    """End the worker thread; if lost ranks block it, the process will exit with status 1 when
    Python exits.

    ended: done within `seconds` when the worker has ended; joined: the worker, if it is in the
    group.
    """
    ended.add_done_callback(retrieve)
    await asyncio.wait([ended], timeout=seconds)
    leaving: asyncio.Future[None] | None = None
    if not ended.done() and joined is not None:
        leaving = asyncio.get_running_loop().create_future()
        threading.Thread(target=_leave, args=(joined, leaving), daemon=True).start()
        await asyncio.wait([ended, leaving], timeout=END_SECONDS)
    if not ended.done() or not (leaving is None or leaving.done()):
        logger.error("rank 0 waits for other ranks for ever: the process ends with status 1")
        with contextlib.suppress(OSError):
            dump_stacks()
        atexit.register(_end_process)
        return
    await thread.close()
    if (error := ended.exception()) is not None:
        logger.warning("rank 0 did not end well: %s: %s", type(error).__name__, error)


def dump_stacks() -> None:
    """Write this process's stacks. Raises OSError if standard error is closed."""
    faulthandler.dump_traceback(file=2)  # A notebook's sys.stderr is no file.


def _leave(joined: RankWorker, left: asyncio.Future[None]) -> None:
    """Leave the group on this thread. The process must not end during that call, as it would
    abort.
    """
    try:
        joined.leave()
    except Exception:
        logger.warning("rank 0 did not leave the others well", exc_info=True)
    with contextlib.suppress(RuntimeError):  # The loop has closed.
        left.get_loop().call_soon_threadsafe(set_once, left, None)


def _end_process() -> None:
    """End the process: a library call does not return."""
    logging.shutdown()
    os._exit(1)
