"""Tokens of a row that its cache has in levels, in plain torch."""

from __future__ import annotations

import torch

from ...core.nn.context import CacheLevels
from ...core.nn.kv_cache.level_cache import LevelPart
from ...core.protocols.attention import AttentionSpec


def sees_all(spec: AttentionSpec, max_model_len: int) -> bool:
    """Return whether a layer has tokens in levels: no window or chunks end before them."""
    return spec.reach is None or spec.reach.most_tokens >= max_model_len


def level_tokens(
    kv_cache: torch.Tensor,
    levels: CacheLevels,
    counts: list[int],
    table: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Return keys and values of each level, [tokens, num_kv_heads, head_dim] each, and the column
    after their blocks. counts: tokens of each level; table: [columns], the row's blocks
    """
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    column = 0
    for form, count in zip(levels.formats, counts, strict=True):
        end = column + -(-count // form.tokens)
        blocks = table[column:end].long()
        for found, part in zip((keys, values), kv_cache.unbind(), strict=True):
            found.append(LevelPart.of(part, form).read(blocks, dtype)[:count])
        column = end
    return keys, values, column
