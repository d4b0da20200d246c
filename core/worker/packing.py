"""Many small arrays in one asynchronous copy."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Collects numpy arrays, and sends them as one buffer.

    Each `send` uses a fresh pinned buffer; torch reuses one only after its copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[np.ndarray] = []
        self._size = 0

    def add(self, array: np.ndarray) -> int:
        """Queue an int32, int64 or float32 array; return its place in `send()`."""
        self._arrays.append(array)
        self._size += _padded(array.nbytes)
        return len(self._arrays) - 1

    def send(self) -> list[torch.Tensor]:
        """Enqueue the copy; return the device tensors in order."""
        arrays = self._arrays
        if not arrays:
            return []
        pinned = self._device.type == "cuda"
        host = torch.empty(self._size, dtype=torch.uint8, pin_memory=pinned)
        buffer = host.numpy()
        # Arrays of a type follow each other, so that few operations divide what was copied.
        places: dict[np.dtype[Any], list[int]] = {}
        for place, array in enumerate(arrays):
            places.setdefault(array.dtype, []).append(place)
        parts: list[tuple[slice, list[int]]] = []
        """Per type: its bytes, and lengths of arrays and padding."""
        end = 0
        for dtype, same in places.items():
            begin = end
            lengths: list[int] = []
            for place in same:
                array = arrays[place]
                target = buffer[end : end + array.nbytes].view(dtype)
                target.reshape(array.shape)[...] = array
                size = _padded(array.nbytes)
                end += size
                lengths += array.size, (size - array.nbytes) // dtype.itemsize
            parts.append((slice(begin, end), lengths))
        packed = host.to(self._device, non_blocking=True)
        tensors = [packed] * len(arrays)
        for (dtype, same), (extent, lengths) in zip(places.items(), parts, strict=True):
            divided = packed[extent].view(_TORCH_DTYPES[dtype]).split(lengths)
            for place, tensor in zip(same, divided[::2], strict=True):
                shape = arrays[place].shape
                tensors[place] = tensor if len(shape) == 1 else tensor.view(shape)
        return tensors


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Enqueue copies of int32, int64 or float32 tensors to the host (pinned from a GPU).

    Contiguous tensors of common memory, like a sampler's outputs, take one copy of their whole
    range.
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
