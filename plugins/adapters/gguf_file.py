"""A GGUF file of a stranger: keys and tensors, every length checked against the file.

The reader of the package `gguf` is for one's own files: it takes an array's length as it is said,
and maps the file.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core.errors import ConfigError, shown
from .regular_file import RegularFile

MAX_HEADER = 32 << 20
MAX_COUNT = 1 << 18
"""Keys, tensors, and values of an array."""
MAX_TEXT = 1 << 16
MAX_DIMS = 4
ALIGNMENT = 32
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Type of a value → how struct reads it."""
TEXT, ARRAY = 8, 9
DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
Q8_0, BLOCK = 8, 32
"""A type of blocks: a float16 scale, and as many bytes."""


class GgufTensor(NamedTuple):
    """What the header says of a tensor."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    """From the file's begin."""


class GgufFile(RegularFile):
    """A GGUF file, versions 2 and 3, little-endian."""

    kind = "GGUF file"

    def __init__(self, path: Path, folder: Path) -> None:
        """Raises ConfigError if it is no file of `folder`, or no GGUF file."""
        super().__init__(path, folder)
        self._content = self.read_bytes(0, min(self.size, MAX_HEADER))
        self._position = 0
        try:
            if self._content[:4] != b"GGUF":
                raise self.refused("it does not begin with GGUF")
            self._position = 4
            version, num_tensors, num_keys = self._take("IQQ")
            if version not in (2, 3):
                raise self.refused(f"its version is {version}; 2 and 3 are read")
            self.fields = dict(self._field() for _ in range(self._count(num_keys)))
            self.tensors = self._tensors(self._count(num_tensors))
        except (struct.error, UnicodeDecodeError) as error:
            raise self.refused(f"its header cannot be read: {error}") from error
        del self._content

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read a tensor, in the type of the file; blocks as float32. index: read what is there of
        the first dimension alone."""
        tensor = self.tensors[name]
        if index is not None:
            tensor = tensor._replace(shape=tensor.shape[1:])
            tensor = tensor._replace(offset=tensor.offset + index * _size(tensor))
        content = torch.from_numpy(self.read_array(tensor.offset, _size(tensor)))
        if tensor.kind != Q8_0:
            return content.view(DTYPES[tensor.kind]).reshape(tensor.shape)
        blocks = content.view(-1, 2 + BLOCK)
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        return (blocks[:, 2:].view(torch.int8) * scales).reshape(tensor.shape)

    def _take(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        values = struct.unpack_from(form, self._content, self._position)
        self._position += struct.calcsize(form)
        return values

    def _count(self, count: int) -> int:
        if count > MAX_COUNT:
            raise self.refused(f"it has {count} of what at most {MAX_COUNT} are read")
        return count

    def _text(self) -> str:
        (length,) = self._take("Q")
        if length > MAX_TEXT:
            raise self.refused(f"it has a text of {length} bytes")
        (text,) = self._take(f"{length}s")
        return str(text, "utf-8")

    def _field(self) -> tuple[str, Any]:
        name = self._text()
        (kind,) = self._take("I")
        return name, self._value(kind)

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == ARRAY:
            kind, count = self._take("IQ")
            if kind in SCALARS:
                return list(self._take(f"{self._count(count)}{SCALARS[kind]}"))
            if kind == TEXT:
                return [self._text() for _ in range(self._count(count))]
        if kind not in SCALARS:
            raise self.refused(f"it has a value of type {kind}")
        (value,) = self._take(SCALARS[kind])
        return value

    def _tensors(self, count: int) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for _ in range(count):
            name = self._text()
            (num_dims,) = self._take("I")
            if num_dims > MAX_DIMS or name in tensors:
                raise self.refused(f"the tensor {shown(name)} is there twice, or has too many dims")
            *shape, kind, offset = self._take(f"{num_dims}QIQ")
            tensors[name] = GgufTensor(tuple(reversed(shape)), kind, offset)
        alignment = self.fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
            raise self.refused(f"its alignment is {shown(alignment)}")
        begin = -(-self._position // alignment) * alignment
        placed = {}
        for name, tensor in tensors.items():
            if tensor.kind not in (*DTYPES, Q8_0):
                raise ConfigError(
                    f"{name}: an adapter's tensors are F32, F16, BF16 or Q8_0, and this one is of "
                    f"type {tensor.kind}",
                    param=name[: MAX_DIMS * 128],
                )
            placed[name] = tensor._replace(offset=begin + tensor.offset)
            if placed[name].offset + _size(tensor) > self.size:
                raise self.refused(f"{shown(name)} ends beyond the file")
        return placed


def _size(tensor: GgufTensor) -> int:
    count = math.prod(tensor.shape)
    if tensor.kind == Q8_0:
        return count // BLOCK * (2 + BLOCK)
    return count * DTYPES[tensor.kind].itemsize
