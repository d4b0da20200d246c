"""Memory of a CUDA device that other processes map, by calls of the driver that torch lacks.

torch's own sharing counts users in files that remain when a process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call the driver; raises RuntimeError with the name of its error."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        error = (text.value or b"unknown error").decode()
        raise RuntimeError(f"{name}: {error} ({status})")


@contextlib.contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Make a device's context current on this thread, as the driver's calls need one;
    `torch.cuda.device` sets none if the device is already the thread's, as the first one always is.
    """
    number, context, before = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device.index or 0))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(before))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", number)


_unused: dict[tuple[int, int], list[int]] = {}
"""Addresses by device and size. Memory that other processes may have open is never freed, but
reused for the next group."""


class SharedMemory:
    """Zeros on a device, and opened memory of other processes."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._key = (device.index or 0, num_bytes)
        self._opened: list[int] = []
        unused = _unused.setdefault(self._key, [])
        torch.cuda.synchronize(device)  # Which also makes the context.
        with _context(device):
            self.pointer: int = unused.pop() if unused else _allocate(num_bytes)
            """Address in this process."""
            address, size = ctypes.c_uint64(self.pointer), ctypes.c_size_t(num_bytes)
            _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
            _call("cuCtxSynchronize")

    def handle(self) -> bytes:
        """Return the handle by which another process opens it."""
        handle = _Handle()
        with _context(self._device):
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Return the address of another process's memory here."""
        memory = ctypes.c_uint64()
        with _context(self._device):
            _call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(memory),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(LAZY_PEER_ACCESS),
            )
        self._opened.append(memory.value)
        return memory.value

    def close(self) -> None:
        """Close opened memory, and leave this process's own to the next group. Thread-safe."""
        opened, self._opened = self._opened, []
        with _context(self._device):
            for address in opened:
                _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        _unused[self._key].append(self.pointer)


def _allocate(num_bytes: int) -> int:
    memory = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(num_bytes))
    return memory.value
