"""Encoded KV blocks in host memory, and which saves have ended."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class BlockMemory:
    """Bytes by key within a limit; the least recently used go first. A `BlockStore`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self._changed = threading.Condition()
        self._last_saved = -1
        self._closed = False

    def count_present(self, keys: Sequence[bytes]) -> int:
        """Count leading keys, which are used now, the last one longest ago: without the head of a
        prefix its tail is of no use.
        """
        with self._changed:
            present = list(takewhile(self._blocks.__contains__, keys))
            for key in reversed(present):
                self._blocks.move_to_end(key)
            return len(present)

    def get(self, key: bytes) -> bytes | None:
        with self._changed:
            return self._blocks.get(key)

    def put(self, key: bytes, data: bytes) -> None:
        with self._changed:
            self._forget(key)
            if len(data) > self._limit or self._closed:
                return
            while self._size + len(data) > self._limit:
                self._forget(next(iter(self._blocks)))
            self._blocks[key] = data
            self._size += len(data)

    def remove(self, key: bytes) -> None:
        with self._changed:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._size -= len(self._blocks.pop(key, b""))

    def save_ended(self, transfer: int) -> None:
        """Note that this save and all before it have ended."""
        with self._changed:
            self._last_saved = transfer
            self._changed.notify_all()

    def await_save(self, transfer: int, seconds: float) -> None:
        """Return at the end of a save, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._last_saved >= transfer or self._closed, timeout=seconds
            )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._blocks.clear()
            self._size = 0
            self._changed.notify_all()
