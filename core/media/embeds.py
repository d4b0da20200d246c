"""Items given as embeddings: what their encoder would have returned for a picture, a recording or
a video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..parts.media import MediaContent
from ..protocols.media import ProcessedMedia, TakesRows
from .readers import runs_of
from .sources import Embeds
from .tensors import check_finite, content_of_rows, read_rows, read_tensor, refused

MAX_ITEMS = 1024
"""In one tensor; more numbers that say how large they are, are not read."""


def contents_of(
    embeds: Embeds, processor: Any, width: int, longest: int, field: str
) -> list[MediaContent]:
    """Return the items. width: numbers of a row; longest: tokens of a prompt. Blocks. Raises
    InvalidRequest."""
    name = embeds.name
    if name not in embeds.tensors:
        raise refused(f"{field}.{name}", "is missing")
    if not isinstance(processor, TakesRows):
        raise refused(field, f"this model's {embeds.modality} items are not taken as embeddings")
    where = field if len(embeds.tensors) == 1 else f"{field}.{name}"
    rows = read_rows(embeds.tensors[name], where, width)
    if len(rows) > longest:
        raise refused(where, f"has {len(rows)} rows, and a prompt has at most {longest} tokens")
    check_finite(rows, where)
    fields = {
        key: _numbers(value, f"{field}.{key}")
        for key, value in embeds.tensors.items()
        if key != name
    }
    try:
        items = processor.of_rows(len(rows), fields)
    except (ValueError, TypeError) as error:
        raise refused(field, str(error)) from None
    return _split(items, rows, embeds, where)


def _numbers(value: Any, field: str) -> np.ndarray:
    """Return what says how large items are, such as grids. Raises InvalidRequest."""
    if isinstance(value, list | tuple):
        try:
            value = np.asarray(value)
        except ValueError:
            raise refused(field, "must be a tensor") from None
    tensor = read_tensor(value, field)
    if tensor.numel() > 3 * MAX_ITEMS:
        raise refused(field, f"has more than {3 * MAX_ITEMS} numbers")
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        raise refused(field, f"tensors of {tensor.dtype} are not read here") from None


def _split(
    items: Sequence[ProcessedMedia], rows: Any, embeds: Embeds, field: str
) -> list[MediaContent]:
    runs = [runs_of(item) for item in items]
    counts = [sum(count for _, count in own) for own in runs]
    if sum(counts) != len(rows) or not all(counts):
        raise refused(field, f"has {len(rows)} rows, and its sizes say {sum(counts)}")
    if embeds.single and len(items) != 1:
        raise refused(field, f"is one item, not {len(items)}")
    contents = []
    for item, own, part in zip(items, runs, rows.split(counts), strict=True):
        tokens = tuple(map(int, item.token_ids))
        contents.append(
            content_of_rows(
                part, embeds.modality, tokens, own, item.grid, item.frame_positions
            )
        )  # fmt: skip
    return contents
