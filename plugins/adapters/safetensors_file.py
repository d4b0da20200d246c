"""A safetensors file of a stranger: header and bounds checked, tensors read when asked for.

Read with `pread`, not mapped: a file that is cut off while it is mapped ends the process.
"""

from __future__ import annotations

import math
import os
import stat
import weakref
from pathlib import Path

import msgspec
import torch

from ...core.errors import ConfigError, shown

MAX_HEADER = 32 << 20
"""Bytes of the header: some 200,000 tensors."""
MAX_TENSORS = 1 << 18
MAX_DIMS = 8
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""Types that adapters are stored in."""
SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of a value of each type."""
HUB_FILES = "blobs"
"""The folder to which a snapshot's links point in the cache of Hugging Face's hub."""


class TensorEntry(msgspec.Struct, frozen=True):
    """What the header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorFile:
    """A safetensors file that stays open."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Raises ConfigError if it is no file of `folder`, or no safetensors file."""
        self.name = path.name
        self._descriptor = open_regular(path, folder)
        weakref.finalize(self, os.close, self._descriptor)
        self._stat = _identity(os.fstat(self._descriptor))
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(self._bytes(0, 8), "little") if size >= 8 else -1
        if not 0 < length <= min(size - 8, MAX_HEADER):
            raise self._refused(f"its header has {length} bytes, of a file with {size}")
        self._begin = 8 + length
        self.entries = self._checked_entries(self._bytes(8, length), size - self._begin)
        """Name → what the header says."""

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor, in the type of the file. Raises ConfigError if the file has changed since
        it was opened, or the type is not one of `DTYPES`."""
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ConfigError(
                f"{name}: an adapter's tensors are {', '.join(DTYPES)}, and this one is "
                f"{shown(entry.dtype)}",
                param=name,
            )
        begin, end = entry.data_offsets
        if begin == end:
            return torch.empty(entry.shape, dtype=dtype)
        content = self._bytes(self._begin + begin, end - begin)
        if _identity(os.fstat(self._descriptor)) != self._stat:
            raise self._refused("it was changed while it was read")
        return torch.frombuffer(content, dtype=dtype).reshape(entry.shape)

    def _bytes(self, offset: int, size: int) -> bytearray:
        content = bytearray(size)
        view, done = memoryview(content), 0
        while done < size:
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not count:
                raise self._refused("it ends before its last tensor does")
            done += count
        return content

    def _checked_entries(self, header: bytearray, data_size: int) -> dict[str, TensorEntry]:
        try:
            fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            fields.pop("__metadata__", None)
            if len(fields) > MAX_TENSORS:
                raise self._refused(f"it has {len(fields)} tensors; at most {MAX_TENSORS} are read")
            entries = {
                name: msgspec.json.decode(field, type=TensorEntry) for name, field in fields.items()
            }
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise self._refused(f"its header cannot be read: {error}") from error
        position = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            dims = entry.shape
            if entry.dtype not in SIZES or len(dims) > MAX_DIMS or min(dims, default=0) < 0:
                raise self._refused(f"{shown(name)} is {shown(entry.dtype)} {shown(dims)}")
            size = SIZES[entry.dtype] * math.prod(dims)
            if begin != position or end - begin != size:
                raise self._refused(
                    f"{shown(name)} takes {size} bytes from {position} on, and its header says "
                    f"{begin} to {end}"
                )
            position = end
        if position != data_size:
            raise self._refused(f"its tensors take {position} bytes, and it has {data_size}")
        return entries

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.name} is not a safetensors file: {reason}", param=self.name)


def open_regular(path: Path, folder: Path) -> int:
    """Open a regular file of a folder, and return its descriptor. Links may point to files of the
    same folder, or of the hub's cache that the folder belongs to.

    Raises ConfigError for all else: pipes, devices, links that leave.
    """
    try:
        target, root = path.resolve(strict=True), folder.resolve(strict=True)
        cache = root.parent.parent / HUB_FILES
        if not (target.is_relative_to(root) or target.is_relative_to(cache)):
            raise ConfigError(f"{path.name} is a link that leaves its folder", param=path.name)
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(target, flags)
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path.name} cannot be read: {reason}", param=path.name) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path.name} is not a regular file", param=path.name)
    return descriptor


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
