"""Spans of a prompt whose tokens see each other in both directions, in a causal decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..protocols.attention import AttentionSpec
from .kv_cache.quantized_cache import KVCache, read_keys, read_values
from .sdpa import sdpa


class Span(NamedTuple):
    """The tokens of a span that a step computes: its last ones."""

    row: int
    """Number of the row in the step."""
    first_token: int
    """Number of the token in the step."""
    first_position: int
    end: int
    """Position behind the span; all before it are cached once the step has written its own."""


def attend_in_spans(
    spans: Sequence[Span],
    spec: AttentionSpec,
    query: torch.Tensor,
    kv_cache: KVCache,
    block_table: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
) -> None:
    """Overwrite what causal attention has computed for the tokens of spans: they see all up to
    their span's end, and as far back as the layer's window.

    query, out: [num_tokens, num_heads, head_dim]
    """
    window = spec.sliding_window
    for row, token, position, end in spans:
        count = end - position
        first = 0 if window is None else max(0, position - window + 1)
        origin = first // block_size * block_size
        blocks = block_table[row, origin // block_size : -(-end // block_size)].long()
        keys = read_keys(kv_cache, blocks, query.dtype, spec.key_scale)
        values = read_values(kv_cache, blocks, query.dtype, spec.value_scale)
        parts = (part.flatten(0, 1)[: end - origin] for part in (keys, values))
        keys, values = (part.transpose(0, 1) for part in parts)  # [heads, tokens, head_dim]
        queries = query[token : token + count].transpose(0, 1)
        mask = None
        if window is not None:
            places = torch.arange(origin, end, device=query.device)
            own = torch.arange(position, end, device=query.device)
            mask = places > own[:, None] - window
        if spec.soft_cap is None:
            attended = sdpa(
                queries[None], keys[None], values[None], mask=mask, scale=spec.scale,
                enable_gqa=True,
            )[0]  # fmt: skip
        else:
            attended = _soft_capped(spec, queries, keys, values, mask)
        out[token : token + count] = attended.transpose(0, 1)


CAPPED_ROWS = 512
"""Queries whose scores are in memory at once."""


def _soft_capped(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with soft-capped scores. query: [heads, tokens, head_dim]."""
    assert spec.soft_cap is not None
    each = query.shape[0] // key.shape[0]
    key, value = (part.repeat_interleave(each, dim=0) for part in (key, value))
    out = []
    for first in range(0, query.shape[1], CAPPED_ROWS):
        rows = slice(first, first + CAPPED_ROWS)
        scores = (query[:, rows] @ key.transpose(1, 2)).float() * spec.scale
        scores = (scores / spec.soft_cap).tanh_() * spec.soft_cap
        if mask is not None:
            scores.masked_fill_(~mask[rows], -torch.inf)
        out.append(scores.softmax(dim=-1).to(value.dtype) @ value)
    return torch.cat(out, dim=1)
