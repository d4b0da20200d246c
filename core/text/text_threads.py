"""Threads for rendering and tokenizing, apart from asyncio's shared ones.

Long texts have one thread of their own, so that others never wait for them, and only one at a time
takes memory.
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
"""Characters of a long text."""
THREADS = 2
"""For other texts."""
MAX_WAITING_CHARACTERS = 64 << 20
"""Most characters waiting or in work; beyond, requests are refused (503)."""
_TRIM = 1 << 20
"""Characters from which freed memory is returned to the system."""
_NODES = 2000
"""Values that `rough_size` reads."""


class TextThreads:
    """Runs work on texts, on threads chosen by size; one per engine."""

    def __init__(self, max_waiting_characters: int = MAX_WAITING_CHARACTERS) -> None:
        self._max = max_waiting_characters
        self._pools = {
            False: ThreadPoolExecutor(THREADS, "jackfield-text"),
            True: ThreadPoolExecutor(1, "jackfield-long-text"),
        }
        """Long or not → threads, started when needed."""
        self._lock = threading.Lock()
        self._characters = 0

    @property
    def waiting_characters(self) -> int:
        return self._characters

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on `size` characters on a thread.

        Raises EngineOverloaded. If cancelled early, `work` never begins.
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
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def rough_size(*values: Any) -> int:
    """Return the characters in JSON values; at least LONG_JOB for too many values."""
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
    """Return the C library's freed memory to the system, if possible."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
