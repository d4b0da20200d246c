"""Torch twins of attention over a paged cache, and of what comes before it: the same computations
in float32, with the launchers' arguments, on any device."""

from __future__ import annotations

from typing import Any

import torch

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantize_heads(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., head_dim] → codes of a quantized cache, [..., width], and words, [...] int32.

    The zero is the middle of the range, the scale what reaches its ends, rounded up: bfloat16.
    """
    x = x.float()
    ends = torch.stack([x.min(dim=-1).values, x.max(dim=-1).values])
    zero = (ends.sum(0) * 0.5).bfloat16()
    steps, middle = (127.0, 0.0) if bits == 8 else (7.5, 7.5)
    reach = (ends - zero.float()).abs().max(dim=0).values * (1.0 / steps)
    scale = reach.bfloat16()
    scale = torch.where(scale.float() < reach, scale.nextafter(scale + 1e30), scale)
    used = scale.float().clamp(min=1e-30)
    codes = torch.floor((x - zero.float()[..., None]) * (1.0 / used)[..., None] + (middle + 0.5))
    codes = codes.clamp(middle - steps, middle + steps)
    codes = torch.where(scale.float()[..., None] > 1e-30, codes, middle + 0.5).floor()
    words = torch.stack([scale, zero], dim=-1).view(torch.int32)[..., 0]
    if bits == 8:
        return codes.to(torch.int8), words
    half = x.shape[-1] // 2
    return (codes[..., :half] + 16 * codes[..., half:]).to(torch.uint8), words


def dequantize_cache(cache: Cache) -> torch.Tensor:
    """→ [2, num_blocks, block_size, num_kv_heads, head_dim] float32"""
    if isinstance(cache, torch.Tensor):
        return cache.float()
    parts = []
    for codes, words in zip(cache[:2], cache[2].transpose(2, 3), strict=True):
        pairs = words.contiguous().view(torch.bfloat16).float().view(*words.shape, 2)
        scale, zero = pairs[..., :1], pairs[..., 1:]
        if codes.dtype == torch.int8:
            parts.append(codes.float() * scale + zero)
        else:
            numbers = torch.cat([codes % 16, codes // 16], dim=-1).float()
            parts.append((numbers - 7.5) * scale + zero)
    return torch.stack(parts)


def kv_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: Cache,
    slot_mapping: torch.Tensor,
    cache_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Scatter key and value, [num_tokens, num_kv_heads, head_dim], into the paged cache.

    kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], changed in place.
    slot_mapping: [num_tokens] int64, block * block_size + offset.
    """
    slots = slot_mapping.to(torch.int64)
    if not isinstance(kv_cache, torch.Tensor):
        size = kv_cache[0].shape[1]
        for codes, words, part in zip(kv_cache[:2], kv_cache[2], (key, value), strict=True):
            bits = 8 if codes.dtype == torch.int8 else 4
            codes[slots // size, slots % size], new_words = quantize_heads(part, bits)
            words[slots // size, :, slots % size] = new_words
        return
    for cache, part, scale in zip(kv_cache, (key, value), cache_scales, strict=True):
        if cache.element_size() == 1:
            largest = torch.finfo(cache.dtype).max
            part = (part.float() / scale).clamp(-largest, largest).to(cache.dtype)
            cache, part = cache.view(torch.uint8), part.view(torch.uint8)
        cache.flatten(0, 1).index_copy_(0, slots, part.to(cache.dtype))


def paged_attention(
    query: torch.Tensor,
    kv_cache: Cache,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    chunk_lookback: int = 0,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Causal attention of ragged rows over a paged cache, one row at a time.

    query: [num_tokens, num_heads, head_dim]; kv_cache as in `kv_cache_write`;
    block_table: [num_rows, max_blocks]; query_start: [num_rows + 1]; seq_lens: [num_rows].
    alibi_slopes, sinks: [num_heads]; distance_bias: [num_heads, num_distances]. A row's queries are
    the last positions of its sequence.
    Returns the shape of query; a row without tokens has no output, and a row of an empty sequence
    gives zeros.
    """
    out = torch.zeros_like(query)
    cached = dequantize_cache(kv_cache)
    block_size = cached.shape[2]
    group = query.shape[1] // cached.shape[3]
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if begin == end or length == 0:
            continue
        blocks = block_table[row, : -(-length // block_size)].long()
        key, value = cached[:, blocks].flatten(1, 2)[:, :length]
        key, value = key * cache_scales[0], value * cache_scales[1]
        key = key.repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(length, device=query.device)
        distance = positions[length - (end - begin) :, None] - positions[None, :]
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * distance
        if distance_bias is not None:
            scores = (
                scores + distance_bias.float()[:, distance.clamp(0, distance_bias.shape[1] - 1)]
            )
        visible = distance >= 0
        if sliding_window is not None:
            visible &= distance < sliding_window
        if attention_chunk_size is not None:
            chunk = positions // attention_chunk_size
            visible &= chunk[length - (end - begin) :, None] - chunk <= chunk_lookback
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
    return out


def paged_attention_decode(
    query: torch.Tensor,
    kv_cache: Cache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """`paged_attention` with one query per row, and its options: query [num_rows, num_heads,
    head_dim]."""
    query_start = torch.arange(query.shape[0] + 1, dtype=torch.int32)
    return paged_attention(query, kv_cache, block_table, query_start, seq_lens, **options)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `rotary_dim` channels of each head, half against half; float32 out.

    x: [num_tokens, heads, head_dim]; cos_sin: [max_positions, rotary_dim], cosines then sines.
    """
    cos, sin = (half[:, None, :] for half in cos_sin[positions].float().chunk(2, dim=-1))
    half = cos.shape[-1]
    sizes = [half, half, x.shape[-1] - 2 * half]
    first, second, rest = torch.split(x.float(), sizes, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
    query_norm: tuple[torch.Tensor, float] | None = None,
    key_norm: tuple[torch.Tensor, float] | None = None,
    kv_cache: Cache | None = None,
    slot_mapping: torch.Tensor | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Norm and rotate queries and keys in place; store keys and values in the cache if it is given.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; norms: (weight, eps) over a head.
    """
    all_heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    query, key, value = torch.split(all_heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    rotated = []
    for part, norm in ((query, query_norm), (key, key_norm)):
        wide = part.float()
        if norm is not None:
            scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm[1])
            wide = wide * scale * norm[0].float()
        rotated.append(wide if cos_sin is None else rotate(wide, positions, cos_sin))
    query.copy_(rotated[0])
    key.copy_(rotated[1])
    if kv_cache is not None:
        assert slot_mapping is not None
        kv_cache_write(key, value, kv_cache, slot_mapping, cache_scales)
