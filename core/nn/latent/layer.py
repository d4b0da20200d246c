"""One layer's latent attention: its shape and its cache; the backend computes it.

The cache has one entry a token, whatever the number of heads, so every rank keeps all of it and has
some of the heads (DeepSeek-V2, arXiv 2405.04434). A layer with an indexer has the indexer's key of
each token beside it, as a part of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...cache.groups import CachePart, TokenCache
from ...protocols.latent_attention import (
    ChosenTokens,
    LatentAttentionBackend,
    LatentAttentionSpec,
)
from ..context import BuildContext, ForwardContext
from ..norm import LayerNorm, RMSNorm
from ..rotary import Rotary


class LatentAttention(nn.Module):
    """Causal attention over the paged cache of latents that the worker binds."""

    latent_cache: torch.Tensor | None
    """[num_blocks, block_size, latent_dim + rope_dim]"""
    index_cache: torch.Tensor | None
    """[num_blocks, block_size, index_dim]"""
    group: int
    """Number of the cache group whose block table the layer reads; set by the worker."""
    query_ring: torch.Tensor | None
    """[places, num_heads, nope_dim + rope_dim] Where queries are kept, for KV compressors that need
    them; set by the worker."""
    absorbed: torch.Tensor | None
    """What kept queries absorb: `up` of the last step, as a backend gets it."""

    def __init__(
        self,
        spec: LatentAttentionSpec,
        build: BuildContext,
        *,
        interleaved: bool,
        index_dim: int | None = None,
    ) -> None:
        """`interleaved`: rotations turn pairs of neighbours, otherwise half against half;
        `index_dim`: channels of the layer's index keys, None if it has no indexer."""
        super().__init__()
        self.spec, self.interleaved, self.index_dim = spec, interleaved, index_dim
        self.operations = build.operations
        self.latent_cache = self.index_cache = None
        self.query_ring = self.absorbed = None
        self.cache: Mapping[str, torch.Tensor] = {}
        """What `bind` was given."""
        self.group = 0

    def cache_spec(self, dtype: torch.dtype) -> TokenCache:
        """Return the layer's cache contents, for a cache of this type."""
        name = str(dtype).removeprefix("torch.")
        latent = CachePart("latent", (self.spec.cache_dim,), name)
        if self.index_dim is None:
            return TokenCache((latent,))
        return TokenCache((latent, CachePart("index", (self.index_dim,), name)))

    def bind(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Use this cache: the parts of `cache_spec` by name, each [1, num_blocks, block_size,
        *shape]."""
        self.cache = parts
        self.latent_cache = parts["latent"][0]
        if self.index_dim is not None:
            self.index_cache = parts["index"][0]

    def reads_all(self, context: ForwardContext) -> bool:
        """Return whether nothing is chosen in this step: no row is longer than `index_topk`, as far
        as the host knows. Precompilation needs the kernels of longer rows, too."""
        return self._is_short(context) and not context.precompiling

    def _is_short(self, context: ForwardContext) -> bool:
        most = self.spec.index_topk
        return most is None or context.layout.max_seq_len <= most

    def choose(
        self,
        query: torch.Tensor | None,
        key: torch.Tensor,
        weights: torch.Tensor | None,
        context: ForwardContext,
        *,
        norm: LayerNorm,
        rotary: Rotary,
        interleaved: bool,
    ) -> ChosenTokens | None:
        """Cache the step's index keys, and choose what its queries read.

        query: [num_tokens, index_heads, index_dim] and weights: [num_tokens, index_heads] float32,
        None to choose nothing; key: [num_tokens, index_dim]; query and key may be overwritten.
        norm: of keys. See `IndexOperations`.
        """
        cache, topk = self.index_cache, self.spec.index_topk
        assert cache is not None, "the worker binds the cache before the first step"
        assert topk is not None and norm.bias is not None
        layout, _ = context.of_group(self.group)
        query = self.operations.cached_index_keys(
            query, key, norm.weight, norm.bias, norm.eps, context.positions, rotary.cos_sin, cache,
            layout.slot_mapping, interleaved=interleaved,
        )  # fmt: skip
        if query is None or weights is None:
            return None
        return self.operations.choose_cached_tokens(
            query, weights, cache, layout.block_table, layout.query_start, context.positions,
            topk=topk, max_seq_len=layout.max_seq_len,
        )  # fmt: skip

    def forward(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
        context: ForwardContext,
        *,
        norm: RMSNorm,
        rotary: Rotary | None,
        chosen: ChosenTokens | None = None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads * (nope_dim + rope_dim)]; latent: [num_tokens, latent_dim +
        rope_dim], may be a view of a wider tensor; both may be overwritten. up: [num_heads *
        (nope_dim + value_dim), latent_dim], each head's rows for its key, then for its value; norm:
        of the latent; chosen: what queries read, None for all up to their own → [num_tokens,
        num_heads * value_dim]
        """
        spec, backend, cache = self.spec, context.backend, self.latent_cache
        assert cache is not None, "the worker binds the cache before the first step"
        assert isinstance(backend, LatentAttentionBackend), "the worker chooses a latent one"
        layout, metadata = context.of_group(self.group)
        tokens = self.operations.cached_latents(
            query.unflatten(1, (spec.num_heads, spec.key_dim)), latent, norm.weight, norm.eps,
            context.positions, None if rotary is None else rotary.cos_sin, cache,
            layout.slot_mapping, interleaved=self.interleaved,
        )  # fmt: skip
        weights = up.view(spec.num_heads, -1, spec.latent_dim)
        if self.query_ring is not None and context.query_places is not None:
            kept, places = context.query_places
            self.absorbed = weights
            own = tokens.query if kept is None else tokens.query[kept]
            self.query_ring.index_copy_(0, places, own)
        arguments = (spec, tokens.query, tokens.latent, weights, cache, metadata)
        if chosen is None:
            return backend.forward(*arguments).flatten(1)
        if self._is_short(context):  # Precompiling: such a step launches other kernels.
            backend.forward(*arguments)
        return backend.forward(*arguments, chosen=chosen).flatten(1)
