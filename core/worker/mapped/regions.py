"""Ranges of addresses that keep their tensors while their memory is away."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from ...loading.model_tensors import ModelTensors, move_tensors
from .driver import AddressSpace

CHUNK_BYTES = 256 << 20
"""Mapped at once: few enough pieces, and little lost at the end of a model's weights."""
ALIGNMENT = 512
"""Alignment of tensors in bytes, as torch's allocator has it."""
BESIDE = "draft_weights"
"""Owner of the weights of models that serve beside the engine's."""


class Region:
    """A range of addresses. Its tensors, and who has it, keep it alive."""

    def __init__(self, space: AddressSpace, size: int, chunk: int = CHUNK_BYTES) -> None:
        """size: bytes, without memory at first."""
        self._space = space
        unit = space.granularity
        self.size = -(-size // unit) * unit
        self._chunk = -(-chunk // unit) * unit
        self._address = space.reserve(self.size)
        self._handles: dict[int, int] = {}
        """Offset of a chunk that has memory → its handle."""
        end = weakref.finalize(
            self, _give_up, space, self._address, self.size, self._chunk, self._handles
        )
        end.atexit = False  # The end of the process frees all.

    def __contains__(self, address: int) -> bool:
        return self._address <= address < self._address + self.size

    @property
    def nbytes(self) -> int:
        """How much memory there is now."""
        return sum(min(self._chunk, self.size - begin) for begin in self._handles)

    def map(self, end: int | None = None) -> None:
        """Put memory everywhere, or up to an offset. Raises OutOfMemoryError, after which there is
        as much as before."""
        new = []
        try:
            for begin in range(0, self.size if end is None else end, self._chunk):
                if begin not in self._handles:
                    size = min(self._chunk, self.size - begin)
                    self._handles[begin] = self._space.map(self._address + begin, size)
                    new.append(begin)
        except torch.OutOfMemoryError:
            for begin in new:
                self._unmap(begin)
            raise

    def unmap(self) -> int:
        """Give all memory back; return how much it was. No step is in flight."""
        size = self.nbytes
        self._space.synchronize()
        for begin in list(self._handles):
            self._unmap(begin)
        return size

    def _unmap(self, begin: int) -> None:
        size = min(self._chunk, self.size - begin)
        self._space.unmap(self._address + begin, size, self._handles.pop(begin))

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """Return a tensor of bytes, where there is memory: [size] uint8."""
        assert 0 < size <= self.size - offset
        return self._space.tensor(self._address + offset, size, self)

    def chunks(self) -> list[torch.Tensor]:
        """Return the bytes that have memory, for copies."""
        return [
            self.tensor(begin, min(self._chunk, self.size - begin))
            for begin in sorted(self._handles)
        ]


def _give_up(
    space: AddressSpace, address: int, size: int, chunk: int, handles: dict[int, int]
) -> None:
    if handles:
        space.synchronize()
    for begin, handle in handles.items():
        space.unmap(address + begin, min(chunk, size - begin), handle)
    handles.clear()
    space.free(address, size)


class MappedMemory:
    """What a rank's weights and caches are in, so that it can be given back."""

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self._regions: dict[str, list[weakref.ref[Region]]] = {}

    def regions(self, owner: str) -> list[Region]:
        """Return the regions of "weights", `BESIDE` or "kv_cache"."""
        regions = (each() for each in self._regions.get(owner, ()))
        return [region for region in regions if region is not None]

    @property
    def nbytes(self) -> int:
        """Memory of all regions now, which torch's allocator does not count."""
        return sum(region.nbytes for owner in self._regions for region in self.regions(owner))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a cache's tensor of zeros. Raises OutOfMemoryError."""
        size = math.prod(shape) * dtype.itemsize
        if not size or device.type != self._space.device.type:
            return torch.zeros(*shape, dtype=dtype, device=device)
        region = self._region("kv_cache", size)
        region.map()
        return region.tensor(0, size).zero_().view(dtype).view(*shape)

    def move(self, model: nn.Module, owner: str = "weights") -> None:
        """Move a model's tensors here, but those that are here. Raises OutOfMemoryError; meanwhile
        there are the largest twice, and a chunk."""
        here = [region for name in self._regions for region in self.regions(name)]
        storages = [
            storage
            for address, (_, storage) in ModelTensors.of(model).storages().items()
            if storage.device == self._space.device and not any(address in each for each in here)
        ]
        places = {storage.data_ptr() for storage in storages if storage.nbytes()}
        if not places:
            return
        region = self._region(owner, sum(_aligned(storage.nbytes()) for storage in storages))
        del storages  # Each goes once it is copied.
        end = 0

        def place(old: torch.UntypedStorage) -> torch.UntypedStorage:
            nonlocal end
            begin, end = end, end + _aligned(old.nbytes())
            region.map(end)
            new = region.tensor(begin, old.nbytes()).untyped_storage()
            new.copy_(old)
            return new

        move_tensors(model, places, place)

    def _region(self, owner: str, size: int) -> Region:
        region = Region(self._space, size)
        self._regions.setdefault(owner, []).append(weakref.ref(region))
        return region


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
