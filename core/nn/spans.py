"""Spans of a prompt whose tokens see each other in both directions, in a causal decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..protocols.attention import AttentionSpec
from .kv_cache.quantized_cache import KVCache, read_keys, read_values


class Span(NamedTuple):
    """The tokens of a span that a step computes: its last ones."""

    row: int
    """Of the step."""
    first_token: int
    """Of the step."""
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
        attended = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=spec.scale,
            enable_gqa=True,
        )[0]  # fmt: skip
        out[token : token + count] = attended.transpose(0, 1)
