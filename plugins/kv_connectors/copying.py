"""Copies whole KV blocks between the paged caches of all layers and rows of host memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

cuda: Any = torch.cuda
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
CHUNK_BYTES = 64 << 20
"""Bytes gathered on the device at a time."""


class BlockCopier:
    """A row is a block: the bytes of all its parts, layer after layer.

    Each copier has its own stream, and belongs to one thread. Methods return when the copy is done.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """kv_caches: [num_parts] tensors [count, num_blocks, block_size, ...]"""
        self.device = kv_caches[0].device
        self.block_bytes = sum(cache[:, 0].nbytes for cache in kv_caches)
        width = math.gcd(8, *(cache.shape[-1] * cache.itemsize for cache in kv_caches))
        self._word = WORDS[width]
        """Unit of copies, as single bytes would be slow."""
        self._row_word = self._word
        """Unit of a row."""
        with torch.inference_mode():
            self._caches = [cache.view(self._word) for cache in kv_caches]
        self._sizes = [cache[:, 0].numel() for cache in self._caches]
        self._chunk = max(1, CHUNK_BYTES // self.block_bytes)
        self._stream = cuda.Stream(self.device) if self.device.type == "cuda" else None

    def new_rows(self, count: int) -> torch.Tensor:
        """[count, block_bytes] uint8 pinned host memory."""
        pinned = self._stream is not None
        return torch.empty(count, self.block_bytes, dtype=torch.uint8, pin_memory=pinned)

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int], pool: torch.Tensor, rows: Sequence[int]) -> None:
        """Cache → host. pool: [num_rows, block_bytes] uint8; block i goes to row rows[i]."""
        pool = pool.view(self._row_word)
        with self._on_stream():
            for blocks, targets in self._chunks(block_ids, rows):
                chunk = self._gather(torch.tensor(blocks, device=self.device))
                for first, row, count in runs(targets):
                    pool[row : row + count].copy_(chunk[first : first + count], non_blocking=True)
        self.synchronize()

    @torch.inference_mode()
    def write(
        self, block_ids: Sequence[int], pool: torch.Tensor, rows: Sequence[int], after: Any = None
    ) -> None:
        """Host → cache, once the device has passed the event `after`."""
        if self._stream is not None and after is not None:
            self._stream.wait_event(after)
        pool = pool.view(self._row_word)
        with self._on_stream():
            for blocks, sources in self._chunks(block_ids, rows):
                index = torch.tensor(blocks, device=self.device)
                chunk = self._new_chunk(len(blocks))
                for first, row, count in runs(sources):
                    chunk[first : first + count].copy_(pool[row : row + count], non_blocking=True)
                self._scatter(index, chunk)
        self.synchronize()

    def _gather(self, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of blocks, [n, words of a row], on the device."""
        chunk = self._new_chunk(len(index))
        for cache, part in zip(self._caches, self._parts(chunk), strict=True):
            part.copy_(cache.index_select(1, index).transpose(0, 1))
        return chunk

    def _scatter(self, index: torch.Tensor, chunk: torch.Tensor) -> None:
        """Write the rows of blocks to the caches."""
        for cache, part in zip(self._caches, self._parts(chunk), strict=True):
            cache.index_copy_(1, index, part.transpose(0, 1))

    def _on_stream(self) -> Any:
        return contextlib.nullcontext() if self._stream is None else cuda.stream(self._stream)

    def _new_chunk(self, count: int) -> torch.Tensor:
        words = self.block_bytes // self._row_word.itemsize
        return torch.empty(count, words, dtype=self._row_word, device=self.device)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _chunks(
        self, block_ids: Sequence[int], rows: Sequence[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        for first in range(0, len(block_ids), self._chunk):
            last = first + self._chunk
            yield list(block_ids[first:last]), list(rows[first:last])

    def _parts(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """[n, words] → [num_parts] views [n, count, block_size, ...]"""
        return [
            part.view(len(chunk), cache.shape[0], *cache.shape[2:])
            for cache, part in zip(
                self._caches, torch.split(chunk, self._sizes, dim=1), strict=True
            )
        ]


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive rows as (index of the first, its row, length)."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield first, rows[first], i - first
            first = i
