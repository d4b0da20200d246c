"""Many small arrays in one copy that never waits: from the host to the device, and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 16

_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_NUMPY_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in _TORCH_DTYPES.items()}


class PackedUpload:
    """Collects numpy arrays, then sends all of them as one buffer.

    Every `send` fills a fresh pinned buffer. Torch's pinned allocator reuses a block only after the
    copies that read it are done, so it is not overwritten under a step in flight.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> int:
        """Queue an int32, int64 or float32 array of any shape; returns its place in `send()`."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def send(self) -> list[torch.Tensor]:
        """Return the queued arrays as device tensors, in order; the copy is only enqueued."""
        arrays = self._arrays
        if not arrays:
            return []
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        pinned = self._device.type == "cuda"
        host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        buffer = host.numpy()
        # Arrays of the same type follow each other, so that few operations divide the copy.
        order = sorted(range(len(arrays)), key=lambda place: arrays[place].dtype.num)
        end = 0
        for place in order:
            begin, end = end, end + sizes[place]
            target = buffer[begin : begin + arrays[place].nbytes].view(arrays[place].dtype)
            target.reshape(arrays[place].shape)[...] = arrays[place]
        packed = host.to(self._device, non_blocking=True)
        tensors: dict[int, torch.Tensor] = {}
        end = 0
        for dtype, same in groupby(order, key=lambda place: arrays[place].dtype):
            places = list(same)
            begin, end = end, end + sum(sizes[place] for place in places)
            lengths: list[int] = []
            for place in places:
                padding = (sizes[place] - arrays[place].nbytes) // dtype.itemsize
                lengths += arrays[place].size, padding
            parts = packed[begin:end].view(_TORCH_DTYPES[dtype]).split(lengths)[::2]
            for place, part in zip(places, parts, strict=True):
                shape = arrays[place].shape
                tensors[place] = part if len(shape) == 1 else part.view(shape)
        return [tensors[place] for place in range(len(arrays))]


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Enqueue copies of int32, int64 or float32 tensors to the host, into pinned memory from a GPU.

    Contiguous tensors that share their memory, as a sampler's outputs do, come in one copy of all
    that lies between the first and the last of them.
    """
    sharing: dict[tuple[int, str], list[str]] = {}
    for name, tensor in tensors.items():
        own = "" if tensor.is_contiguous() else name
        sharing.setdefault((tensor.untyped_storage().data_ptr(), own), []).append(name)
    copies: dict[str, np.ndarray] = {}
    for names in sharing.values():
        if len(names) == 1:
            copies[names[0]] = _copied(tensors[names[0]]).numpy()
            continue
        group = [tensors[name] for name in names]
        starts = [tensor.storage_offset() * tensor.itemsize for tensor in group]
        ends = [start + tensor.nbytes for start, tensor in zip(starts, group, strict=True)]
        first, size = min(starts), max(ends) - min(starts)
        whole = torch.empty(0, dtype=torch.uint8, device=group[0].device)
        whole.set_(group[0].untyped_storage(), first, (size,), (1,))
        numbers = _copied(whole).numpy()
        for name, tensor, start, end in zip(names, group, starts, ends, strict=True):
            part = numbers[start - first : end - first].view(_NUMPY_DTYPES[tensor.dtype])
            copies[name] = part.reshape(tensor.shape)
    return copies


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)
