"""One layer's attention: its shape and its cache; the attention backend computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..cache.formats import QuantizedFormat
from ..cache.groups import CachePart, TokenCache
from ..protocols.attention import AttentionBackend, AttentionSpec, Projection
from .context import BatchLayout, BuildContext, ForwardContext
from .kv_cache.quantized_cache import KVCache, QuantizedCache
from .layer_operations.heads import HeadLayout, rotate
from .layer_operations.products import Norm
from .norm import RMSNorm
from .rotary import Rotary
from .spans import attend_in_spans


class Attention(nn.Module):
    """Causal attention over the paged cache that the worker binds."""

    kv_cache: KVCache | None
    """[2 (key, value), num_blocks, block_size, num_kv_heads, head_dim]; or quantized"""
    cache_format: QuantizedFormat | torch.dtype | None
    """How the layer's keys and values are stored, set by the worker; None: in the type that
    `cache_spec` is given."""
    group: int
    """Number of the cache group whose block table the layer reads; set by the worker."""
    query_ring: torch.Tensor | None
    """[places, num_heads, head_dim] Where queries are kept, for KV compressors that need them; set
    by the worker."""
    cache_scales: tuple[float, float]
    """The checkpoint's scales of keys and values. With an fp8 cache, `spec` has these or calculated
    ones."""

    def __init__(
        self, spec: AttentionSpec, build: BuildContext, *, norm_last: bool = False
    ) -> None:
        """`norm_last`: heads are rotated, then normed; otherwise normed, then rotated."""
        super().__init__()
        self.spec, self.norm_last = spec, norm_last
        self.layout = HeadLayout(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.operations = build.operations
        self.kv_cache = None
        self.cache: Mapping[str, torch.Tensor] = {}
        """What `bind` was given."""
        self.cache_format = None
        self.group = 0
        self.query_ring = None
        self.cache_scales = (1.0, 1.0)
        self.next_weights: tuple[torch.Tensor, ...] = ()
        """Weights that are read after this layer, for backends that read ahead."""
        self._projections: dict[AttentionBackend, Projection | None] = {}
        """Each backend's plan for this layer."""

    def cache_spec(self, dtype: torch.dtype) -> TokenCache:
        """Return the layer's cache contents, for a cache of this type; its own format precedes."""
        spec, own = self.spec, self.cache_format
        if isinstance(own, QuantizedFormat):
            return TokenCache(own.parts(spec.num_kv_heads, spec.head_dim), spec.reach)
        name = str(own or dtype).removeprefix("torch.")
        part = CachePart("kv", (spec.num_kv_heads, spec.head_dim), name, count=2)
        return TokenCache((part,), spec.reach)

    def bind(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Use this cache: the parts of `cache_spec` by name, each [count, num_blocks, block_size,
        *shape]."""
        quantized = "scales" in parts
        self.cache = parts
        self.kv_cache = QuantizedCache.of(parts) if quantized else parts["kv"]

    def forward(
        self,
        qkv: torch.Tensor,
        context: ForwardContext,
        *,
        rotary: Rotary | None = None,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], may be overwritten
        → [num_tokens, num_heads * head_dim]

        Queries and keys are normed over each head and rotated, if norms and rotation are given.
        sinks: [num_heads], if the spec has them; distance_bias: as `AttentionBackend.forward` has
        it, if the spec does.
        """
        positions, cos_sin = context.rotation(rotary) if rotary else (context.positions, None)
        norms = (query_norm.norm if query_norm else None, key_norm.norm if key_norm else None)
        # A backend's own plan turns tokens by one position each.
        plain = rotary is None or cos_sin is rotary.cos_sin
        if plain and not context.spans(self.spec):
            out = self._project(qkv, positions, cos_sin, *norms, context)
        else:
            out = None
        if out is not None:
            return out.reshape(out.shape[0], -1)
        heads = self._heads(qkv, positions, cos_sin, *norms, context)
        return self.attend(*heads, context, sinks=sinks, distance_bias=distance_bias, cached=True)

    def _project(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        context: ForwardContext,
    ) -> torch.Tensor | None:
        """Compute the whole layer as planned by the backend, or None."""
        backend, _, metadata, _ = self._bound(context)
        if backend not in self._projections:
            learned = self.spec.sinks or self.spec.distance_bias
            self._projections[backend] = None if learned else backend.plan_projection(self)
        project = self._projections[backend]
        kept = None if self.query_ring is None else context.query_places
        if project is None or (kept is not None and kept.tokens is not None):
            return None
        places = None if kept is None else kept.places
        arguments = self, qkv, cos_sin, query_norm, key_norm, metadata, places
        if positions is context.positions:
            return project(*arguments)
        return project(*arguments, positions=positions)

    def _heads(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split into heads, norm, rotate, and write a standard cache → query, key, value, as for
        `attend`.
        """
        backend, layout, _, kv_cache = self._bound(context)
        if self.norm_last and cos_sin is not None:
            self._rotate(qkv, cos_sin[positions])
            cos_sin = None
        arguments = (qkv, self.layout, positions, cos_sin, query_norm, key_norm)
        if not backend.standard_cache:
            return self.operations.heads(*arguments)
        return self.operations.cached_heads(
            *arguments, kv_cache, layout.slot_mapping, self._cache_scales
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
        *,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
        cached: bool = False,
    ) -> torch.Tensor:
        """Write keys and values to the cache, and attend to it, with heads as they are.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim];
        sinks, distance_bias: if the spec has them → [num_tokens, num_heads * head_dim]. `cached`:
        the cache has them already, where this backend reads the standard cache.
        """
        backend, layout, metadata, kv_cache = self._bound(context)
        if backend.standard_cache and not cached:
            self.operations.write_cache(
                key, value, kv_cache, layout.slot_mapping, self._cache_scales
            )
        if self.query_ring is not None and context.query_places is not None:
            tokens, places = context.query_places
            self.query_ring.index_copy_(0, places, query if tokens is None else query[tokens])
        # A backend without a feature has no such argument.
        learned = {"sinks": sinks, "distance_bias": distance_bias}
        learned_arguments = {name: values for name, values in learned.items() if values is not None}
        out = backend.forward(self.spec, query, key, value, kv_cache, metadata, **learned_arguments)
        if spans := context.spans(self.spec):
            embeds = context.input_embeds
            assert embeds is not None, "it has spans"
            attend_in_spans(
                spans, self.spec, query, kv_cache, layout.block_table, embeds.block_size, out
            )
        return out.reshape(out.shape[0], -1)

    def _rotate(self, qkv: torch.Tensor, cos_sin: torch.Tensor) -> None:
        count = self.layout.num_heads + self.layout.num_kv_heads
        heads = qkv[:, : count * self.layout.head_dim].view(-1, count, self.layout.head_dim)
        heads.copy_(rotate(heads, cos_sin[:, None].to(qkv.dtype)))

    @property
    def _cache_scales(self) -> tuple[float, float]:
        return self.spec.key_scale, self.spec.value_scale

    def _bound(self, context: ForwardContext) -> tuple[AttentionBackend, BatchLayout, Any, KVCache]:
        """Return this step's backend, layout, metadata and cache."""
        assert self.kv_cache is not None, "the worker binds the cache before the first step"
        backend = context.backend
        assert isinstance(backend, AttentionBackend), "the worker chooses one for keys and values"
        return backend, *context.of_group(self.group), self.kv_cache
