"""Tensors that requests send: read with bounds from files of torch, NumPy or safetensors, never by
unpickling.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import Any

import numpy as np
import torch

from ..errors import InvalidRequest
from ..parts.media import ROWS, MediaContent, MediaTensor
from .fetch import decode_base64

MAX_DESCRIPTION_BYTES = 1 << 16
"""Of what a file says of its one tensor."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of embeddings."""


def read_tensor(value: Any, field: str) -> torch.Tensor:
    """Return a dense tensor in the host's memory: a tensor, an array, or a file of one that
    torch.save, numpy.save or safetensors wrote, as bytes or base64. A caller's own tensor may be a
    view of fewer numbers than its shape says. Raises InvalidRequest."""
    num_bytes: int | None = None
    if isinstance(value, np.ndarray):
        tensor = _of_array(value, field)
    elif isinstance(value, torch.Tensor):
        tensor = value
    else:
        data = _bytes_of(value, field)
        tensor, num_bytes = _of_file(data, field), len(data)
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise refused(field, "must be a dense tensor of the host's memory")
    if num_bytes is not None and tensor.nbytes > num_bytes:  # Copied, it would be larger.
        raise refused(field, "must have all of its numbers in the file")
    return tensor.detach()


def read_rows(value: Any, field: str, width: int) -> torch.Tensor:
    """Return embeddings, [num_rows, width], not copied yet. Raises InvalidRequest."""
    tensor = read_tensor(value, field)
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise refused(field, f"must be of one of the types {names}, not {tensor.dtype}")
    if tensor.dim() == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 2 or tensor.shape[1] != width or not len(tensor):
        shape = tuple(tensor.shape)
        raise refused(field, f"must have the shape [num_tokens, {width}], not {shape}")
    return tensor


def check_finite(rows: torch.Tensor, field: str) -> None:
    """Raise InvalidRequest for rows with NaN or infinity, with the first row's number."""
    finite = torch.isfinite(rows).all(dim=1)
    if not finite.all():
        row = int(finite.logical_not().nonzero()[0])
        raise refused(field, f"row {row} has numbers that are not finite")


def content_of_rows(
    rows: torch.Tensor,
    modality: str,
    token_ids: tuple[int, ...],
    runs: tuple[tuple[int, int], ...],
    grid: tuple[int, ...] = (),
    frame_positions: tuple[int, ...] = (),
) -> MediaContent:
    """Return an item whose rows are given."""
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(rows.dtype).removeprefix("torch.")
    place = (modality, dtype, tuple(rows.shape), token_ids, runs, grid, frame_positions)
    digest = hashlib.blake2b(repr(place).encode(), digest_size=32)
    digest.update(data)
    return MediaContent(
        modality=modality,
        digest=f"{ROWS} {digest.hexdigest()}",
        token_ids=token_ids,
        runs=runs,
        tensors={ROWS: MediaTensor(dtype, tuple(rows.shape), data)},
        grid=grid,
        frame_positions=frame_positions,
    )


def refused(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", param=field)


# ---------------------------------------------------------------- files


def _bytes_of(value: Any, field: str) -> bytes:
    if isinstance(value, str):
        try:
            return decode_base64(value)
        except ValueError:
            raise refused(field, "must be base64") from None
    if not isinstance(value, bytes | bytearray | memoryview):
        kind = type(value).__name__
        raise refused(field, f"must be a tensor, bytes or base64, not {kind}")
    return bytes(value)


def _of_file(data: bytes, field: str) -> torch.Tensor:
    """Return the tensor in a file. Raises InvalidRequest."""
    if data.startswith(b"\x93NUMPY"):
        name, read = "numpy.save", _of_numpy
    elif data.startswith(b"PK"):
        name, read = "torch.save", _of_torch
    elif data[8:9] == b"{":
        name, read = "safetensors", _of_safetensors
    else:
        raise refused(field, "is no tensor that torch.save, numpy.save or safetensors wrote")
    try:
        return read(data, field)
    except InvalidRequest:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise refused(field, f"is no tensor that {name} wrote: {reason}") from None


def _of_numpy(data: bytes, field: str) -> torch.Tensor:
    """Read by the header alone: `numpy.load` allocates what it says before the rest is read."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    one = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(file, max_header_size=MAX_DESCRIPTION_BYTES)
    if dtype.hasobject:
        raise refused(field, f"arrays of {dtype} are not read")
    array = np.frombuffer(data, dtype, offset=file.tell())
    return _of_array(array.reshape(shape, order="F" if by_columns else "C"), field)


def _of_array(array: np.ndarray, field: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError):
        raise refused(field, f"arrays of {array.dtype} are not read") from None


def _of_torch(data: bytes, field: str) -> torch.Tensor:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    _check_entries(entries, len(data), field)
    read = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if type(read) not in (torch.Tensor, torch.nn.Parameter):
        raise refused(field, f"must be one tensor, not {type(read).__name__}")
    tensor: torch.Tensor = read
    return tensor


def _check_entries(entries: list[zipfile.ZipInfo], num_bytes: int, field: str) -> None:
    """Refuse files that would become larger when they are read. Raises InvalidRequest."""
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > num_bytes:
        raise refused(field, "must not be compressed")
    if any(e.filename.endswith(".pkl") and e.file_size > MAX_DESCRIPTION_BYTES for e in entries):
        raise refused(field, "must be one tensor")


def _of_safetensors(data: bytes, field: str) -> torch.Tensor:
    from safetensors.torch import load

    if int.from_bytes(data[:8], "little") > MAX_DESCRIPTION_BYTES:
        raise refused(field, "must be one tensor")
    tensors = load(data)
    if len(tensors) != 1:
        raise refused(field, f"must be one tensor, not {len(tensors)}")
    return next(iter(tensors.values()))
