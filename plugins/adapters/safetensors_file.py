"""A safetensors file of a stranger: header and bounds checked, tensors read when asked for."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import torch

from ...core.errors import ConfigError, shown
from .regular_file import RegularFile

MAX_HEADER = 24 << 20
"""Bytes of the header: some 170,000 tensors. It is decoded in one go, and other threads wait."""
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


class TensorEntry(msgspec.Struct, frozen=True):
    """What the header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorFile(RegularFile):
    """A safetensors file."""

    kind = "safetensors file"

    def __init__(self, path: Path, folder: Path) -> None:
        """Raises ConfigError if it is no file of `folder`, or no safetensors file."""
        super().__init__(path, folder)
        length = int.from_bytes(self.read_bytes(0, 8), "little") if self.size >= 8 else -1
        if not 0 < length <= min(self.size - 8, MAX_HEADER):
            raise self.refused(f"its header has {length} bytes, of a file with {self.size}")
        self._begin = 8 + length
        self.entries = self._checked_entries(self.read_bytes(8, length), self.size - self._begin)
        """Name → what the header says."""
        self._tensors: dict[str, torch.Tensor] = {}
        """Those that were read: each is asked for twice, for the digest and by the model."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in the type of the file, not to be changed. Raises ConfigError if the
        file has changed since it was opened, or the type is not one of `DTYPES`."""
        if name not in self._tensors:
            self._tensors[name] = self._read(name)
        return self._tensors[name]

    def _read(self, name: str) -> torch.Tensor:
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
        content = torch.from_numpy(self.read_array(self._begin + begin, end - begin))
        return content.view(dtype).reshape(entry.shape)

    def _checked_entries(self, header: bytes, data_size: int) -> dict[str, TensorEntry]:
        try:
            fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            fields.pop("__metadata__", None)
            if len(fields) > MAX_TENSORS:
                raise self.refused(f"it has {len(fields)} tensors; at most {MAX_TENSORS} are read")
            entries = {
                name: msgspec.json.decode(field, type=TensorEntry) for name, field in fields.items()
            }
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise self.refused(f"its header cannot be read: {error}") from error
        position = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            dims = entry.shape
            if entry.dtype not in SIZES or len(dims) > MAX_DIMS or min(dims, default=0) < 0:
                raise self.refused(f"{shown(name)} is {shown(entry.dtype)} {shown(dims)}")
            size = SIZES[entry.dtype] * math.prod(dims)
            if begin != position or end - begin != size:
                raise self.refused(
                    f"{shown(name)} takes {size} bytes from {position} on, and its header says "
                    f"{begin} to {end}"
                )
            position = end
        if position != data_size:
            raise self.refused(f"its tensors take {position} bytes, and it has {data_size}")
        return entries
