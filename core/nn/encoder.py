"""Building blocks of encoders: attention in both directions, without a cache; and attention of a
decoder to what an encoder has read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..cache.groups import CachePart, SourceCache
from ..protocols.attention import AttentionSpec
from .context import BuildContext, EncodeContext, ForwardContext
from .layer_operations.heads import HeadLayout, rotate, split_heads
from .ragged import RaggedRows


class BidirectionalAttention(nn.Module):
    """Every token of a row sees every other one. It has no parameters and no cache."""

    def __init__(
        self, num_heads: int, head_dim: int, build: BuildContext, scale: float | None = None
    ) -> None:
        """scale: of the logits; None: 1 / sqrt(head_dim)"""
        super().__init__()
        self.layout = HeadLayout(num_heads, num_heads, head_dim)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.operations = build.operations

    def forward(
        self,
        qkv: torch.Tensor,
        rows: RaggedRows,
        *,
        cos_sin: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, 3 * num_heads * head_dim] → [num_tokens, num_heads * head_dim]

        cos_sin: what rotates queries and keys, [num_tokens, 1, rotary_dim]; distance_bias: as
        `Operations.bidirectional_attention` has it."""
        query, key, value = split_heads(qkv, self.layout)
        if cos_sin is not None:
            query, key = (rotate(part, cos_sin).to(qkv.dtype) for part in (query, key))
        more = {} if distance_bias is None else {"distance_bias": distance_bias}
        out = self.operations.bidirectional_attention(query, key, value, rows, self.scale, **more)
        return out.flatten(1)


class SourceAttention(nn.Module):
    """Attention of each token to all of its sequence's source, in blocks that the worker binds."""

    source_cache: torch.Tensor | None
    """[2 (key, value), num_blocks, block_size, num_kv_heads, head_dim]"""

    def __init__(self, spec: AttentionSpec, build: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        self.operations = build.operations
        self.source_cache = None

    def cache_spec(self, dtype: torch.dtype) -> SourceCache:
        """Return the layer's cache contents, for a cache of this type."""
        shape = (self.spec.num_kv_heads, self.spec.head_dim)
        name = str(dtype).removeprefix("torch.")
        return SourceCache((CachePart("kv", shape, name, count=2),))

    def bind(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Use this cache: the parts of `cache_spec` by name."""
        self.source_cache = parts["kv"]

    def write(self, key_value: torch.Tensor, context: EncodeContext) -> None:
        """Write the keys and values of encoded sources, [S, 2 * num_kv_heads * head_dim]."""
        assert self.source_cache is not None, "the worker binds the cache before the first step"
        heads = key_value.view(len(key_value), 2, self.spec.num_kv_heads, self.spec.head_dim)
        key, value = heads.unbind(1)
        self.operations.write_cache(key, value, self.source_cache, context.slot_mapping)

    def forward(self, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, num_heads * head_dim] → the same shape"""
        assert self.source_cache is not None, "the worker binds the cache before the first step"
        assert context.source is not None, "a model with sources runs with them"
        backend, metadata = context.source
        heads = query.view(len(query), self.spec.num_heads, self.spec.head_dim)
        # The cache has all keys and values: the backend does not read those of the step.
        none = heads[:, : self.spec.num_kv_heads]
        out = backend.forward(self.spec, heads, none, none, self.source_cache, metadata)
        return out.reshape(query.shape)
