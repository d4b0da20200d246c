"""Prompts given as embeddings: items whose rows are given, one after the other."""

from __future__ import annotations

from typing import Any

from ..errors import ContextLengthExceeded
from ..parts.media import MediaItem
from .tensors import check_finite, content_of_rows, read_rows

FIELD = "prompt_embeds"
ROWS_OF_ITEM = 64
"""So that plans carry few, and prefixes that differ late are found in the cache."""


def embeds_items(
    value: Any, hidden_size: int, longest: int
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Return the token ids that stand for a prompt of embeddings, and its items. value: a tensor
    [num_tokens, hidden_size], or a file of one, as bytes or base64 (`read_tensor`). longest: tokens
    of a prompt. Blocks. Raises InvalidRequest, ContextLengthExceeded.
    """
    tensor = read_rows(value, FIELD, hidden_size)
    count = len(tensor)
    if count > longest:
        raise ContextLengthExceeded.of(
            longest, count, f"your {FIELD} has {count} rows. Shorten it.", param=FIELD
        )
    check_finite(tensor, FIELD)
    items = []
    # A last row alone is in the item before it.
    for start in range(0, max(count - 1, 1), ROWS_OF_ITEM):
        end = count if count - start <= ROWS_OF_ITEM + 1 else start + ROWS_OF_ITEM
        ids = (0,) * (end - start)
        content = content_of_rows(tensor[start:end], FIELD, ids, ((0, len(ids)),))
        items.append(MediaItem(start, content))
    return [0] * count, tuple(items)
