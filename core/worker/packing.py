"""Copies many small host arrays to the device in one copy that never waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_ALIGNMENT = 16

_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class PackedUpload:
    """Collects numpy arrays, then sends all of them as one buffer.

    Every `send` fills a fresh pinned buffer. Torch's pinned allocator reuses a block only after the
    copies that read it are done, so it is not overwritten under a step in flight.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[np.ndarray] = []
        self._offsets: list[int] = []
        self._size = 0

    def add(self, array: np.ndarray) -> int:
        """Queue an int32, int64 or float32 array of any shape; returns its place in `send()`."""
        self._arrays.append(array)
        self._offsets.append(self._size)
        self._size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return len(self._arrays) - 1

    def send(self) -> list[torch.Tensor]:
        """Return the queued arrays as device tensors, in order; the copy is only enqueued."""
        if not self._arrays:
            return []
        pinned = self._device.type == "cuda"
        host = torch.empty(self._size, dtype=torch.uint8, pin_memory=pinned)
        buffer = host.numpy()
        for array, offset in zip(self._arrays, self._offsets, strict=True):
            target = buffer[offset : offset + array.nbytes].view(array.dtype)
            target.reshape(array.shape)[...] = array
        packed = host.to(self._device, non_blocking=True)
        return [
            packed[offset : offset + array.nbytes]
            .view(_TORCH_DTYPES[array.dtype])
            .view(array.shape)
            for array, offset in zip(self._arrays, self._offsets, strict=True)
        ]
