"""Addresses and memory as a device's driver has them, apart from each other."""

from __future__ import annotations

import ctypes
from typing import Protocol, runtime_checkable

import torch

NONE, PINNED, DEVICE, READ_WRITE = 0, 1, 1, 3
"""CUDA's numbers: no handle to export, memory of a device, a place of that kind, access."""
DIRECT_RDMA = 110
"""CUDA's number of a device's attribute: network cards may read such memory."""
MISSING = 2
"""CUDA's number of the error that there is not enough memory."""


@runtime_checkable
class AddressSpace(Protocol):
    """Reserves addresses, and puts memory there. For one device."""

    device: torch.device
    granularity: int
    """All sizes are multiples of it."""

    def reserve(self, size: int) -> int:
        """Return the first of `size` addresses without memory. Raises OutOfMemoryError."""

    def free(self, address: int, size: int) -> None:
        """Give addresses back, where there is no memory."""

    def map(self, address: int, size: int) -> int:
        """Put memory there, and return its handle. Raises OutOfMemoryError."""

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Give memory back. Nothing uses it."""

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """Return a tensor of bytes over memory: [size] uint8. It keeps `owner` alive."""

    def synchronize(self) -> None:
        """Wait until nothing uses the device's memory."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte), ("direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class _Allocation(ctypes.Structure):
    """`CUmemAllocationProp`"""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("win32", ctypes.c_void_p), ("flags", _Flags),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`"""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaAddresses:
    """`AddressSpace` of a CUDA device, by its driver's virtual memory management."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # Torch's context is there from now on.
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._cuda = ctypes.CDLL("libcuda.so.1")
        location = _Location(DEVICE, index)
        self._allocation = _Allocation(PINNED, NONE, location)
        self._access = _Access(location, READ_WRITE)
        size = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(self._allocation),
            ctypes.c_int(1),  # The recommended one.
        )
        self.granularity = size.value
        self._allow_rdma(index)

    def _allow_rdma(self, index: int) -> None:
        """Let network cards read the memory, where that is so."""
        flags, rdma = self._allocation.flags, ctypes.c_int(0)
        self._call("cuDeviceGetAttribute", ctypes.byref(rdma), DIRECT_RDMA, index)
        if not rdma.value:
            return
        flags.direct_rdma = 1
        try:
            handle = self._create(ctypes.c_size_t(self.granularity))
        except RuntimeError:  # The device can, and this system does not.
            flags.direct_rdma = 0
        else:
            self._cuda.cuMemRelease(handle)

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size),
            ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def map(self, address: int, size: int) -> int:
        place, length = ctypes.c_uint64(address), ctypes.c_size_t(size)
        try:
            handle = self._create(length)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # What torch keeps for later.
            handle = self._create(length)
        try:
            self._call("cuMemMap", place, length, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            self._call(
                "cuMemSetAccess", place, length, ctypes.byref(self._access), ctypes.c_size_t(1)
            )
        except RuntimeError:
            self._cuda.cuMemUnmap(place, length)
            self._cuda.cuMemRelease(handle)
            raise
        return handle.value

    def _create(self, size: ctypes.c_size_t) -> ctypes.c_uint64:
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._allocation),
            ctypes.c_uint64(0),
        )  # fmt: skip
        return handle

    def unmap(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, size, owner), device=self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _call(self, name: str, *args: object) -> None:
        error = getattr(self._cuda, name)(*args)
        if error == MISSING:
            raise torch.OutOfMemoryError(f"{name}: there is not enough memory on {self.device}")
        if error:
            raise RuntimeError(f"{name}: CUDA's error {error}")


class _Bytes:
    """What torch takes for an array of another library; it keeps this, and this the owner."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None,
            "version": 3,
        }  # fmt: skip
