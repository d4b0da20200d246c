"""Prompts given as embeddings: read from torch's files with bounds, and placed as items of media
whose rows are given.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import zipfile
from typing import Any

import torch

from ..errors import ContextLengthExceeded, InvalidRequest
from ..parts.media import PROMPT_EMBEDS, MediaContent, MediaItem, MediaTensor

FIELD = "prompt_embeds"
ROWS = 64
"""Rows of an item, so that plans carry few, and prefixes that differ late are found in the
cache."""
MAX_PICKLE_BYTES = 1 << 16
"""Of the description in a file, which has one tensor."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def embeds_items(
    value: Any, hidden_size: int, longest: int
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Return the token ids that stand for a prompt of embeddings, and its items. value: a tensor
    [num_tokens, hidden_size], or what torch.save wrote of one, as bytes or base64. longest: tokens
    of a prompt. Blocks. Raises InvalidRequest, ContextLengthExceeded.
    """
    tensor = _checked(value if isinstance(value, torch.Tensor) else _read(value), hidden_size)
    count = len(tensor)
    if count > longest:
        raise ContextLengthExceeded.of(
            longest, count, f"your {FIELD} has {count} rows. Shorten it.", param=FIELD
        )
    tensor = tensor.detach().contiguous()
    items = []
    for start in range(0, max(count - 1, 1), ROWS):  # A last row alone is in the item before it.
        end = count if count - start <= ROWS + 1 else start + ROWS
        items.append(MediaItem(start, _content(tensor[start:end])))
    return [0] * count, tuple(items)


def _content(rows: torch.Tensor) -> MediaContent:
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(rows.dtype).removeprefix("torch.")
    digest = hashlib.blake2b(repr((dtype, tuple(rows.shape))).encode(), digest_size=32)
    digest.update(data)
    return MediaContent(
        modality=FIELD,
        digest=f"{FIELD} {digest.hexdigest()}",
        token_ids=(0,) * len(rows),
        runs=((0, len(rows)),),
        tensors={PROMPT_EMBEDS: MediaTensor(dtype, tuple(rows.shape), data)},
    )


def _checked(tensor: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """Return a dense tensor [num_tokens, hidden_size]. Raises InvalidRequest."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise _refused("must be a dense tensor of the host's memory")
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise _refused(f"must be of one of the types {names}, not {tensor.dtype}")
    if tensor.dim() == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 2 or tensor.shape[1] != hidden_size or not len(tensor):
        shape = tuple(tensor.shape)
        raise _refused(f"must have the shape [num_tokens, {hidden_size}], not {shape}")
    return tensor


def _read(value: Any) -> torch.Tensor:
    """Return the tensor in a file of torch.save. Raises InvalidRequest."""
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise _refused("must be base64") from None
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _refused(f"must be a tensor, bytes or base64, not {type(value).__name__}")
    data = bytes(value)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
        _check_entries(entries, len(data))
        read = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except InvalidRequest:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise _refused(f"is no tensor that torch.save wrote: {reason}") from None
    if type(read) not in (torch.Tensor, torch.nn.Parameter):
        raise _refused(f"must be one tensor, not {type(read).__name__}")
    tensor: torch.Tensor = read
    return tensor


def _check_entries(entries: list[zipfile.ZipInfo], num_bytes: int) -> None:
    """Refuse files that would become larger when they are read. Raises InvalidRequest."""
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not stored or sum(entry.file_size for entry in entries) > num_bytes:
        raise _refused("must not be compressed")
    if any(e.filename.endswith(".pkl") and e.file_size > MAX_PICKLE_BYTES for e in entries):
        raise _refused("must be one tensor")


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}: {reason}", param=FIELD)
