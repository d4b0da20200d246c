"""NCCL's library, for groups with members that know nothing of `torch.distributed`.

A group of vLLM's: number 0 puts NCCL's number of the group into a store under a fixed key, pickled;
all begin the group with it, and add up one number to warm up.
"""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..live.pickled_data import Call, Name, Unreadable, read_pickle

UNIQUE_ID_BYTES = 128
KEY = "broadcast_from/0/0"
"""Key of the first object that rank 0 of a `StatelessProcessGroup` broadcasts."""
BYTE, FLOAT, SUM = 1, 7, 0
"""NCCL's numbers of types and operations."""
IN_PROGRESS = 7


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class NcclGroup:
    """Broadcasts tensors from number 0. Raises RuntimeError if a member has gone."""

    def __init__(
        self, unique_id: bytes, rank: int, size: int, device: torch.device, timeout: float
    ) -> None:
        """Wait for all others, at most `timeout` seconds for each call that NCCL can leave."""
        self._nccl = _library()
        self._device, self._timeout = device, timeout
        self._comm = ctypes.c_void_p()
        number = UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(device):
            self._check(
                self._nccl.ncclCommInitRank(
                    ctypes.byref(self._comm), ctypes.c_int(size), number, ctypes.c_int(rank)
                )
            )
            self._warm_up()

    def _warm_up(self) -> None:
        one = torch.zeros(1, device=self._device)
        place = ctypes.c_void_p(one.data_ptr())
        self._check(
            self._nccl.ncclAllReduce(
                place, place, ctypes.c_size_t(1), ctypes.c_int(FLOAT), ctypes.c_int(SUM),
                self._comm, self._stream(),
            )
        )  # fmt: skip
        self._wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all others, or let it be filled by number 0's. Waits."""
        if not tensor.nbytes:
            return
        place = ctypes.c_void_p(tensor.data_ptr())
        with torch.cuda.device(self._device):
            self._check(
                self._nccl.ncclBroadcast(
                    place, place, ctypes.c_size_t(tensor.nbytes), ctypes.c_int(BYTE),
                    ctypes.c_int(0), self._comm, self._stream(),
                )
            )  # fmt: skip
            self._wait()

    def close(self) -> None:
        """Leave, also if others have gone."""
        if self._comm:
            self._nccl.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _wait(self) -> None:
        """Wait for the device. A member that has gone ends it, or the time."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        end, state = time.monotonic() + self._timeout, ctypes.c_int(0)
        while not done.query():
            self._check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
            if state.value not in (0, IN_PROGRESS) or time.monotonic() > end:
                self.close()
                raise RuntimeError(
                    f"NCCL: the group has waited {self._timeout:g} seconds, or a member has gone"
                )
            time.sleep(0.0005)

    def _check(self, error: int) -> None:
        if error not in (0, IN_PROGRESS):
            self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
            text = self._nccl.ncclGetErrorString(ctypes.c_int(error)) or b"unknown"
            raise RuntimeError(f"NCCL: {text.decode()}")


def _library() -> Any:
    """Return the library that torch has loaded. Raises RuntimeError."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(f"NCCL's library is not there: {error}") from error


def new_unique_id() -> bytes:
    """Return a new group's number."""
    number, nccl = UniqueId(), _library()
    if nccl.ncclGetUniqueId(ctypes.byref(number)):
        raise RuntimeError("NCCL makes no new group")
    return bytes(number)


def agree_on_id(host: str, port: int, rank: int, size: int, timeout: float) -> tuple[bytes, Any]:
    """Return a group's number, which number 0 makes, and the store that it is in, to be kept.
    Raises RuntimeError."""
    limit = timedelta(seconds=timeout)
    store = TCPStore(host, port, size, is_master=rank == 0, timeout=limit, use_libuv=False)
    if rank == 0:
        number = new_unique_id()
        store.set(KEY, pickled_id(number))  # type: ignore[arg-type]  # Bytes are taken as well.
        return number, store
    return read_id(store.get(KEY)), store


# ---------------------------------------------------------------- the number, pickled

STRUCTURE = ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
BUILDER = ("_ctypes", "_unpickle")
"""What makes a structure of ctypes: of its class, and of its attributes and bytes."""


def read_id(data: bytes) -> bytes:
    """Return the number in a pickle, which may hold nothing else. Raises RuntimeError."""
    try:
        call = read_pickle(data, {STRUCTURE, BUILDER})
    except Unreadable as error:
        raise RuntimeError(f"number 0 of the group sends no number of NCCL's: {error}") from None
    match call:
        case Call(name=Name() as name, args=(Name() as kind, (dict(), bytes() as number))):
            if (name, kind) == (BUILDER, STRUCTURE) and len(number) == UNIQUE_ID_BYTES:
                return number
    raise RuntimeError("number 0 of the group sends no number of NCCL's")


def pickled_id(number: bytes) -> bytes:
    """Return the pickle that vLLM reads: of its own structure, which is not there."""
    return (
        b"c_ctypes\n_unpickle\n(c"
        + "{}\n{}\n".format(*STRUCTURE).encode()
        + b"(}B"
        + len(number).to_bytes(4, "little")
        + number
        + b"ttR."
    )
