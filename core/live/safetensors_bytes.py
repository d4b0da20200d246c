"""The header of a safetensors file, without torch: which tensors its bytes are."""

from __future__ import annotations

import msgspec

from ..errors import InvalidRequest, shown
from .worker_jobs import TensorPart

HEAD = 8
"""Bytes that say how long the header is."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""The format's name of a type → torch's."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(body: bytes) -> tuple[tuple[TensorPart, ...], int]:
    """Return the tensors in the order of their bytes, and where these begin. Raises
    InvalidRequest."""
    size = int.from_bytes(body[:HEAD], "little")
    if len(body) < HEAD or size > len(body) - HEAD:
        raise _refused("it ends within its header")
    try:
        header = msgspec.json.decode(body[HEAD : HEAD + size], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refused(f"its header is damaged: {error}") from None
    parts, end = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, last = entry.data_offsets
        if first != end or last < first:
            raise _refused(
                f"tensor {shown(name)} begins at byte {first}, and the one before ends at {end}"
            )
        if (dtype := DTYPES.get(entry.dtype)) is None:
            raise _refused(
                f"tensor {shown(name)} is of type {shown(entry.dtype)}, which is not known here"
            )
        parts.append(TensorPart(name, dtype, entry.shape))
        end = last
    if end != len(body) - HEAD - size:
        raise _refused(
            f"its header speaks of {end} bytes of tensors, and there are {len(body) - HEAD - size}"
        )
    return tuple(parts), HEAD + size


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is no safetensors file: {reason}")
