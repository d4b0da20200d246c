"""One layer's latent attention: its shape and its cache; the backend computes it.

The cache has one entry a token, whatever the number of heads, so every rank keeps all of it and has
some of the heads (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...cache.groups import CachePart, TokenCache
from ...protocols.latent_attention import LatentAttentionBackend, LatentAttentionSpec
from ..context import BuildContext, ForwardContext
from ..norm import RMSNorm
from ..rotary import Rotary


class LatentAttention(nn.Module):
    """Causal attention over the paged cache of latents that the worker binds."""

    latent_cache: torch.Tensor | None
    """[num_blocks, block_size, latent_dim + rope_dim]"""
    group: int
    """Number of the cache group whose block table the layer reads; set by the worker."""

    def __init__(
        self, spec: LatentAttentionSpec, build: BuildContext, *, interleaved: bool
    ) -> None:
        """`interleaved`: rotations turn pairs of neighbours, otherwise half against half."""
        super().__init__()
        self.spec, self.interleaved = spec, interleaved
        self.operations = build.operations
        self.latent_cache = None
        self.group = 0

    def cache_spec(self, dtype: torch.dtype) -> TokenCache:
        """Return the layer's cache contents, for a cache of this type."""
        name = str(dtype).removeprefix("torch.")
        return TokenCache((CachePart("latent", (self.spec.cache_dim,), name),))

    def bind(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Use this cache: the part of `cache_spec`, [1, num_blocks, block_size, cache_dim]."""
        self.latent_cache = parts["latent"][0]

    def forward(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
        context: ForwardContext,
        *,
        norm: RMSNorm,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads * (nope_dim + rope_dim)]; latent: [num_tokens, latent_dim +
        rope_dim], may be a view of a wider tensor; both may be overwritten. up: [num_heads *
        (nope_dim + value_dim), latent_dim], each head's rows for its key, then for its value; norm:
        of the latent → [num_tokens, num_heads * value_dim]
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
        out = backend.forward(spec, tokens.query, tokens.latent, weights, cache, metadata)
        return out.flatten(1)
