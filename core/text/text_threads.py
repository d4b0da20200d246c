"""Threads for rendering and tokenizing texts, apart from the event loop and from each other.

asyncio's shared threads serve files, grammars and start-up, too: a few long texts there would hold
up all of them. Here long texts have one thread to themselves, so that whatever is of an ordinary
length never waits behind one, and so that only one at a time takes memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import EngineOverloaded

T = TypeVar("T")
LONG_JOB = 1 << 18
"""Characters from which on a text goes to the thread of long ones."""
THREADS = 2
"""For all others."""
MAX_WAITING_CHARACTERS = 64 << 20
"""Of all texts that wait or are worked on: with one more, a request is refused (503)."""
_TRIM = 1 << 20
"""Characters from which on memory goes back to the system afterwards."""
_NODES = 2000
"""Values of a JSON object that `rough_size` looks at."""


class TextThreads:
    """Runs work on texts on threads chosen by size. One per engine."""

    def __init__(self, max_waiting_characters: int = MAX_WAITING_CHARACTERS) -> None:
        self._max = max_waiting_characters
        self._pools = {
            False: ThreadPoolExecutor(THREADS, "jackfield-text"),
            True: ThreadPoolExecutor(1, "jackfield-long-text"),
        }
        """Whether a text is long → the threads for it; they start when they are needed."""
        self._lock = threading.Lock()
        self._characters = 0
        """Waiting, or being worked on."""

    @property
    def waiting_characters(self) -> int:
        """Characters of texts that wait or are being processed."""
        return self._characters

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which processes `size` characters, from a thread.

        Raises EngineOverloaded when too much waits. Cancelled before it begins, it never does.
        """
        with self._lock:
            if self._characters and self._characters + size > self._max:
                raise EngineOverloaded(
                    f"texts of {self._characters} characters wait to be tokenized; try again later"
                )
            self._characters += size

        def release(_: Future[T]) -> None:
            with self._lock:
                self._characters -= size

        def trimmed() -> T:
            try:
                return work()
            finally:
                if size >= _TRIM:
                    _give_memory_back()

        try:
            future = self._pools[size >= LONG_JOB].submit(trimmed)
        except BaseException:
            release(Future())
            raise
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Start no more work."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def rough_size(*values: Any) -> int:
    """Return the characters in JSON values; at least LONG_JOB if there are too many values to
    count."""
    size = seen = 0
    stack = list(values)
    while stack:
        value = stack.pop()
        seen += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping | Sequence):
            if seen + len(stack) + len(value) > _NODES:
                return max(size, LONG_JOB)
            stack.extend(value.values() if isinstance(value, Mapping) else value)
    return size


def _give_memory_back() -> None:
    """Return freed memory that the C library keeps to the system, if it has a call for that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
