"""Gives the memory of weights and caches back to the system, and takes it again.

Tensors stay the objects that they are. On a CPU their addresses stay, too: pages are returned, and
come back as zeros. On a CUDA device addresses stay if weights and caches are in mapped memory
(`enable_sleep_mode`); otherwise memory is freed and allocated again, which recorded steps exclude.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import InvalidRequest
from ..live.worker_jobs import Memory
from ..loading.model_tensors import ModelTensors
from .mapped.regions import BESIDE, MappedMemory

MADV_DONTNEED = 4
"""Linux's: drop pages, which are zeros when they are touched again."""
KEPT = ("weights", BESIDE)


class MemoryRelease:
    """The weights and caches of one rank."""

    def __init__(
        self,
        weights: ModelTensors,
        caches: Iterable[torch.Tensor],
        device: torch.device,
        *,
        has_addresses: bool,
        beside: Iterable[ModelTensors] = (),
        mapped: MappedMemory | None = None,
    ) -> None:
        """has_addresses: recorded steps hold addresses; beside: other models' weights, which go
        with the weights and come back as they were, as updates may not bring them; mapped: what all
        of it is in; None: torch's memory."""
        self._device, self._mapped = device, mapped
        self._has_addresses = has_addresses
        self._storages = {
            "weights": [storage for _, storage in weights.storages().values()],
            BESIDE: [storage for each in beside for _, storage in each.storages().values()],
            "kv_cache": _storages(caches),
        }
        if not self._storages[BESIDE]:
            del self._storages[BESIDE]
        self._sizes = {
            owner: [storage.nbytes() for storage in storages]
            for owner, storages in self._storages.items()
        }
        self._away: set[str] = set()
        """Owners whose memory is given back."""
        self._copies: dict[str, list[torch.Tensor]] = {}
        """Weights in host memory, kept for the next time while they stay the same."""

    def forget_copies(self) -> None:
        """Note that the weights are others now."""
        self._copies = {}

    # ------------------------------------------------------------ release and restore

    def check(self, owners: Iterable[str], *, keep: bool) -> None:
        """Raise InvalidRequest if nothing could be freed. keep: the weights' numbers are kept in
        host memory."""
        if self._device.type == "cpu" and os.name != "posix":
            raise InvalidRequest("sleep: this system takes no memory back from a CPU's tensors")
        if self._has_addresses and self._mapped is None:
            raise InvalidRequest(
                "sleep: recorded steps hold addresses of weights and caches, so their memory "
                "cannot be given back; start the engine with enable_sleep_mode"
            )
        if not any(sum(self._sizes[owner]) for owner in self._freed(owners, keep=keep)):
            why = (
                "a CPU's weights that are kept are in host memory already; use level 2"
                if keep
                else "there is nothing of that"
            )
            raise InvalidRequest(f"sleep: nothing can be freed: {why}", param="level")

    def _freed(self, owners: Iterable[str], *, keep: bool) -> list[str]:
        """Return whose memory is given back: the copy of a CPU's weights would be as large."""
        on_cpu = self._device.type == "cpu" and self._mapped is None
        stays = {name for name in KEPT if on_cpu and (keep or name == BESIDE)}
        return [owner for owner in self._with_beside(owners) if owner not in stays]

    def _with_beside(self, owners: Iterable[str]) -> list[str]:
        named = [*owners]
        if "weights" in named and BESIDE in self._storages:
            named.append(BESIDE)
        return named

    def release(self, owners: Iterable[str], *, keep: bool) -> int:
        """Give memory back; return how much. No step is in flight."""
        freed = 0
        for owner in self._freed(owners, keep=keep):
            if owner in self._away:
                continue
            kept = owner == BESIDE or (owner == "weights" and keep)
            if not kept:
                self._copies.pop(owner, None)
            elif owner not in self._copies:
                self._copies[owner] = [_on_host(piece) for piece in self._pieces(owner)]
            if self._mapped is not None:
                freed += sum(region.unmap() for region in self._mapped.regions(owner))
            else:
                freed += sum(map(_give_back, self._storages[owner]))
            self._away.add(owner)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def restore(self, owners: Iterable[str]) -> bool:
        """Take memory again; return whether the weights need their numbers."""
        missing = False
        for owner in self._with_beside(owners):
            if owner not in self._away:
                continue
            self._take(owner)
            self._fill(owner)
            missing |= owner == "weights" and owner not in self._copies
            self._away.discard(owner)
        return missing

    def _take(self, owner: str) -> None:
        """Take an owner's memory again, of which the content is anything."""
        if self._mapped is not None:
            for region in self._mapped.regions(owner):
                region.map()
            return
        for storage, size in zip(self._storages[owner], self._sizes[owner], strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)

    def _fill(self, owner: str) -> None:
        """Give an owner's memory its numbers if they are kept, or zeros."""
        pieces, copies = self._pieces(owner), self._copies.get(owner)
        if copies is not None:
            for piece, copy in zip(pieces, copies, strict=True):
                piece.copy_(copy.untyped_storage(), non_blocking=True)
        elif self._device.type != "cpu":  # A CPU's pages are zeros, and are not touched.
            for piece in pieces:
                empty: Any = piece
                empty.fill_(0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _pieces(self, owner: str) -> list[torch.UntypedStorage]:
        """Return an owner's memory in pieces that are copied at once."""
        if self._mapped is None:
            return self._storages[owner]
        regions = self._mapped.regions(owner)
        return [chunk.untyped_storage() for region in regions for chunk in region.chunks()]

    def report(self) -> list[Memory]:
        """Return who has how much."""
        owners = [
            Memory(owner, sum(sizes), "released" if owner in self._away else str(self._device))
            for owner, sizes in self._sizes.items()
        ]
        if self._copies:
            copies = [copy for of_one in self._copies.values() for copy in of_one]
            owners.append(Memory("weights_copy", sum(copy.nbytes for copy in copies), "host"))
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            owners.append(Memory("allocator", reserved, str(self._device)))
            owners.append(Memory("device_used", total - free, str(self._device)))
        owners.append(Memory("process", _resident_bytes(), "host"))
        return owners


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    return list(storages.values())


def _on_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a copy in host memory, pinned if it comes from another device."""
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    copy.untyped_storage().copy_(storage)
    return copy


def _give_back(storage: torch.UntypedStorage) -> int:
    """Give a storage's memory back; return how many bytes."""
    size = storage.nbytes()
    if storage.device.type != "cpu":
        storage.resize_(0)
        return size
    # Whole pages: the ends may belong to others, too.
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return end - begin


def _resident_bytes() -> int:
    """Return the memory that this process has, as the system sees it; 0 where that is unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0
