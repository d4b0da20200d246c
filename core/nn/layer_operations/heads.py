"""Heads of a projection, their way into the cache, and attention without one: a part of
`Operations`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..kv_cache.quantized_cache import QuantizedCache, write_blocks
from ..ragged import RaggedRows
from ..sdpa import sdpa
from .products import CenteredNorm, Norm, ProductOperations


class HeadLayout(NamedTuple):
    """Split of a projection's last dimension: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class HeadOperations(ProductOperations):
    """T tokens."""

    def norm_heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        query_norm: CenteredNorm,
        key_norm: CenteredNorm,
    ) -> None:
        """Norm queries and keys in place, each head by itself, in float32.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]; norms: weights [head_dim], or of each
        head [heads, head_dim] without biases.
        """
        query, key, _ = split_heads(qkv, layout)
        for part, norm in ((query, query_norm), (key, key_norm)):
            normed = F.layer_norm(part.float(), part.shape[-1:], eps=norm.eps)
            normed *= norm.weight.float()
            part.copy_(normed if norm.bias is None else normed + norm.bias.float())

    def heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split a projection into heads, norm and rotate them.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], may be overwritten; positions: [T];
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines, None without rotation.
        → query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim]
        """
        query, key, value = split_heads(qkv, layout)
        if query_norm is not None:
            query = self.rms_norm(query, query_norm)
        if key_norm is not None:
            key = self.rms_norm(key, key_norm)
        if cos_sin is not None:
            rotation = cos_sin[positions][:, None].to(qkv.dtype)
            query, key = rotate(query, rotation), rotate(key, rotation)
        return query, key, value

    def cached_heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        cache_scales: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do as `heads`, and then as `write_cache`."""
        query, key, value = self.heads(qkv, layout, positions, cos_sin, query_norm, key_norm)
        self.write_cache(key, value, kv_cache, slot_mapping, cache_scales)
        return query, key, value

    def write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        cache_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Write keys and values, [T, num_kv_heads, head_dim] each, to the cache.

        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]; slot_mapping: [T] int64. An
        fp8 cache gets keys and values divided by `cache_scales`, and clamped to the type's range; a
        quantized one computes scales of its own. Only operations with the feature `quantized` get
        one.
        """
        if isinstance(kv_cache, QuantizedCache):
            return write_blocks(key, value, kv_cache, slot_mapping)
        for cache, part, scale in zip(kv_cache, (key, value), cache_scales, strict=True):
            if cache.dtype.itemsize == 1:
                largest = torch.finfo(cache.dtype).max
                part = (part.float() / scale).clamp_(-largest, largest).to(cache.dtype)
                # As bytes: torch has no indexed copy for fp8.
                cache, part = cache.view(torch.uint8), part.view(torch.uint8)
            cache.flatten(0, 1).index_copy_(0, slot_mapping, part.to(cache.dtype))

    def bidirectional_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: RaggedRows,
        scale: float,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention in which each token sees all tokens of its row; nothing is cached.

        query, key, value: [T, num_heads, head_dim] → the same shape. distance_bias: [num_heads,
        2 * n + 1], added to logits: n + (key's position - query's) of at most n either way. Only
        models that have it pass it (`features`).
        """
        out = torch.empty_like(query)
        for group in rows.groups:
            shaped = [part[group.tokens].transpose(1, 2) for part in (query, key, value)]
            mask = group.visible
            if distance_bias is not None:
                mask = _biased(distance_bias.to(query.dtype), group.tokens.shape[1], mask)
            attended = sdpa(shaped[0], shaped[1], shaped[2], mask=mask, scale=scale)
            flat = attended.transpose(1, 2).reshape(-1, *query.shape[1:])
            out[group.source] = flat if group.visible is None else flat[group.place]
        return out


def _biased(distance_bias: torch.Tensor, length: int, visible: torch.Tensor | None) -> torch.Tensor:
    """Return the addition to logits: [rows or 1, num_heads, length, length]

    distance_bias: [num_heads, 2 * n + 1]; visible: [rows, 1, 1, length] bool, None: all.
    """
    most = distance_bias.shape[1] // 2
    places = torch.arange(length, device=distance_bias.device)
    distance = (places - places[:, None]).clamp_(-most, most) + most
    bias = distance_bias[:, distance][None]
    return bias if visible is None else bias.masked_fill(~visible, float("-inf"))


def split_heads(
    qkv: torch.Tensor, layout: HeadLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a projection: query, key, value, each [T, heads, head_dim]."""
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
    query, key, value = heads.split(
        [layout.num_heads, layout.num_kv_heads, layout.num_kv_heads], dim=1
    )
    return query, key, value


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim channels, half against half (NeoX style).

    x: [T, heads, head_dim]; cos_sin: [T, 1, rotary_dim]. Source: RoFormer (arXiv 2104.09864).
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    rotary_dim = cos_sin.shape[-1]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if rotary_dim < x.shape[-1]:
        rotated.append(x[..., rotary_dim:])
    return torch.cat(rotated, dim=-1)
