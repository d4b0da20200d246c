"""One layer's attention: its shape and its cache; the attention backend computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..cache.formats import QuantizedFormat
from ..cache.groups import CachePart, TokenCache
from ..protocols.attention import AttentionBackend, AttentionSpec
from .context import BatchLayout, BuildContext, ForwardContext
from .kv_cache.quantized_cache import KVCache, QuantizedCache
from .norm import RMSNorm
from .operations import HeadLayout, rotate
from .rotary import Rotary


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

    def __init__(self, spec: AttentionSpec, build: BuildContext) -> None:
        super().__init__()
        self.spec = spec
        self.layout = HeadLayout(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.operations = build.operations
        self.kv_cache = None
        self.cache_format = None
        self.group = 0
        self.query_ring = None
        self.cache_scales = (1.0, 1.0)
        self.next_weights: tuple[torch.Tensor, ...] = ()
        """Weights that are read after this layer, for backends that read ahead."""

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
        norm_last: bool = False,
    ) -> torch.Tensor:
        """qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], may be overwritten
        → [num_tokens, num_heads * head_dim]

        Queries and keys are normed over each head, then rotated, if norms and rotation are given,
        or with `norm_last` rotated, then normed.
        sinks: [num_heads], if the spec has them; distance_bias: as `AttentionBackend.forward` has
        it, if the spec does.
        """
        backend, layout, metadata, kv_cache = self._bound(context)
        cos_sin = rotary.cos_sin if rotary else None
        norms = (query_norm.norm if query_norm else None, key_norm.norm if key_norm else None)
        more = self._kept_queries(backend, context)
        if norm_last and more is not None:
            more = {**more, "norm_last": True} if backend.norms_rotated else None
        if backend.reads_ahead and self.next_weights and more is not None:
            more = {**more, "next_weights": self.next_weights}
        if sinks is None and distance_bias is None and more is not None:
            out = backend.forward_projection(
                self.spec, qkv, cos_sin, *norms, kv_cache, metadata, **more
            )
            if out is not None:
                return out.reshape(out.shape[0], -1)
        if norm_last and cos_sin is not None:
            self._rotate(qkv, cos_sin[context.positions])
            cos_sin = None
        cut = (qkv, self.layout, context.positions, cos_sin, *norms)
        if not backend.standard_cache:
            heads = self.operations.heads(*cut)
        else:
            heads = self.operations.cached_heads(
                *cut, kv_cache, layout.slot_mapping, self._cache_scales
            )
        return self.attend(*heads, context, sinks=sinks, distance_bias=distance_bias, cached=True)

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
        learned = {"sinks": sinks, "distance_bias": distance_bias}
        more = {name: values for name, values in learned.items() if values is not None}
        out = backend.forward(self.spec, query, key, value, kv_cache, metadata, **more)
        return out.reshape(out.shape[0], -1)

    def _rotate(self, qkv: torch.Tensor, turn: torch.Tensor) -> None:
        """Rotate queries and keys in place; turn: [num_tokens, rotary_dim]."""
        count = self.layout.num_heads + self.layout.num_kv_heads
        heads = qkv[:, : count * self.layout.head_dim].view(-1, count, self.layout.head_dim)
        heads.copy_(rotate(heads, turn[:, None].to(qkv.dtype)))

    def _kept_queries(
        self, backend: AttentionBackend, context: ForwardContext
    ) -> dict[str, Any] | None:
        """Return the option of `forward_projection` that keeps the step's queries; None: it cannot
        keep them."""
        kept = context.query_places
        if self.query_ring is None or kept is None:
            return {}
        if not backend.keeps_queries or kept.tokens is not None:
            return None
        return {"query_ring": (self.query_ring, kept.places)}

    @property
    def _cache_scales(self) -> tuple[float, float]:
        return self.spec.key_scale, self.spec.value_scale

    def _bound(self, context: ForwardContext) -> tuple[AttentionBackend, BatchLayout, Any, KVCache]:
        """Return the backend, the layer's layout and metadata in this step, and its cache."""
        assert self.kv_cache is not None, "the worker binds the cache before the first step"
        backend = context.backend
        assert isinstance(backend, AttentionBackend), "the worker chooses one for keys and values"
        return backend, *context.of_group(self.group), self.kv_cache
