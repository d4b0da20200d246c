"""Tokens of a row that its cache has in levels, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.nn.context import CacheLevels
from ...core.nn.kv_cache.level_cache import LevelPart
from ...core.protocols.attention import AttentionSpec


def sees_all(spec: AttentionSpec, max_model_len: int) -> bool:
    """Return whether a layer has tokens in levels: no window or chunks end before them."""
    return spec.reach is None or spec.reach.most_tokens >= max_model_len


def level_tokens(
    parts: Sequence[torch.Tensor],
    levels: CacheLevels,
    counts: list[int],
    table: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[list[list[torch.Tensor]], int]:
    """Return what each part has in each level, [tokens, num_heads, width] each, and the column
    after their blocks. parts: [num_blocks, block_size, num_heads, width] each; counts: tokens of
    each level; table: [columns], the row's blocks
    """
    tokens: list[list[torch.Tensor]] = [[] for _ in parts]
    column = 0
    for form, count in zip(levels.formats, counts, strict=True):
        end = column + -(-count // form.tokens)
        blocks = table[column:end].long()
        for own, part in zip(tokens, parts, strict=True):
            own.append(LevelPart.of(part, form).read(blocks, dtype)[:count])
        column = end
    return tokens, column
