"""Torch twins of the kernels: the same computations in float32.

Same arguments as the launchers, any device. If a kernel rounds intermediate values to the storage
type (RMSNorm before its weight), so does its reference, so that the two agree to a few units in the
last place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .activations import ACTIVATIONS
from .quant.quantized_weight import QuantizedWeight, Weight, weight_arguments

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ACTIVATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(), "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


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
    """`paged_attention` with one query per row: query [num_rows, num_heads, head_dim]."""
    query_start = torch.arange(query.shape[0] + 1, dtype=torch.int32)
    return paged_attention(
        query,
        kv_cache,
        block_table,
        query_start,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
        chunk_lookback=chunk_lookback,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        distance_bias=distance_bias,
        sinks=sinks,
        cache_scales=cache_scales,
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [..., hidden_size] → x / sqrt(mean(x²) + eps), rounded to weight's type, times weight;
    residual, of x's shape, is added to the rounded result."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    out = (normed.to(weight.dtype).float() * weight.float()).to(x.dtype)
    return out if residual is None else residual + out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [..., 2 * size], gate then up → silu(gate) * up, [..., size], in float32 until the end."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


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


def gemv(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    layer_norm: tuple[torch.Tensor, torch.Tensor | None, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "",
    factor: float = 1.0,
) -> torch.Tensor:
    """residual + factor * activation(norm(x) Wᵀ + bias), or silu(gate) * up of it; float32 until
    the end.

    x: [M, K], any number of rows; weight: [N, K], the gate's rows first when gated.
    """
    if not isinstance(weight, torch.Tensor):
        weight = dequantize_weight(weight, torch.float32)
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm[1])
        wide = wide * norm[0].float()
    if layer_norm is not None:
        factors, offsets, eps = layer_norm
        offsets = None if offsets is None else offsets.float()
        wide = torch.nn.functional.layer_norm(wide, wide.shape[-1:], factors.float(), offsets, eps)
    out = wide @ weight.float().t()
    if bias is not None:
        out = out + bias.float()
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate) * up
    if activation:
        out = ACTIVATED[ACTIVATIONS[activation]](out)
    if residual is not None:
        out = factor * out + residual.float()
    return out.to(x.dtype)


def small_m_matmul(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """residual + x Wᵀ + bias, or silu(gate) * up of it; float32 until the end."""
    return gemv(x, weight, bias, residual=residual, gated=gated)


def mask_tokens(logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Set logits to -inf, in place, where a token's bit is off. Shapes as for the kernel."""
    shifts = torch.arange(32, device=bits.device)
    off = ((bits.unsqueeze(-1).long() >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 0
    for place, barred in enumerate(off):
        logits[place if rows is None else rows[place], barred] = float("-inf")


def quantize_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [num_rows, size] → (values of `dtype`, [num_rows] float32 scales)."""
    if norm is not None:
        x = rms_norm(x, *norm)
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.float()
    if scale is None:
        scales = wide.abs().amax(dim=1) / largest
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    else:
        scales = scale.float().expand(x.shape[0]).contiguous()
    values = (wide / scales[:, None]).clamp(-largest, largest)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scales


def _e2m1_numbers(words: torch.Tensor, run: int) -> torch.Tensor:
    """[N, width] int32 → [N, 8 * width] float32, number by number as quantized_weight.py has it"""
    rows, width = words.shape
    out = torch.empty(rows, 8 * width, device=words.device)
    for first in range(0, width, run):
        count = min(run, width - first)
        for part in range(8):
            bits = words[:, first : first + count] >> (part // 4 * 16)
            size = bits >> (part % 4 * 3) & 7
            sign = 1 - 2 * (bits >> (14, 12, 15, 13)[part % 4] & 1)
            exponent, fraction = (size >> 1).float(), (size & 1).float()
            number = torch.where(
                exponent > 0, (1 + fraction / 2) * 2 ** (exponent - 1), fraction / 2
            )
            column = 8 * first + part * count
            out[:, column : column + count] = number * sign
    return out


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """→ [N, K]: (value - zero) * scale; layouts as in quantized_weight.py."""
    if weight.e2m1_run is not None:
        values = _e2m1_numbers(weight.values, weight.e2m1_run)
    elif weight.pack_factor > 1:
        mask = (1 << weight.bits) - 1
        parts = [(weight.values >> (i * weight.bits)) & mask for i in range(weight.pack_factor)]
        values = torch.cat(parts, dim=1).float()
    else:
        values = weight.values.float()
    groups = torch.arange(values.shape[1], device=values.device) // weight.group_size
    if weight.zero is None:
        values = values - weight_arguments(weight).format.offset
    else:
        values = values - weight.zero.t().float()[:, groups]
    scale = weight.scale.t().float().repeat_interleave(weight.scale_rows, dim=0)
    return (values * scale[: values.shape[0], groups]).to(dtype)


def split_k_sum(
    partial: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    row_scale: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    total = partial.float().sum(dim=0)
    if row_scale is not None and column_scale is not None:
        total = total * row_scale.float()[:, None] * column_scale.float()
    if bias is not None:
        total = total + bias.float()
    if residual is not None:
        total = total + residual.float()
    return out.copy_(total)


def latent_decode(
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Sums of cached latents by their weights, one query a row; arguments as for the launcher."""
    starts = torch.arange(len(absorbed) + 1)
    sums = torch.zeros(absorbed.shape, dtype=absorbed.dtype, device=absorbed.device)
    lse = torch.zeros(absorbed.shape[:2], device=absorbed.device)
    latent_context(
        absorbed, turned, cache, block_table, starts, seq_lens + 1, scale=scale, out=sums, lse=lse
    )
    return sums


def latent_context(
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    latent_dim, block_size = absorbed.shape[2], cache.shape[1]
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        own = slice(starts[row], starts[row + 1])
        context = length - (own.stop - own.start)
        lse[own] = float("-inf")
        if own.stop == own.start or context == 0:
            continue
        blocks = block_table[row, : -(-context // block_size)].long()
        latents = cache.float()[blocks].flatten(0, 1)[:context]
        queries = torch.cat([absorbed[own], turned[own]], dim=-1).float()
        scores = queries @ latents.mT * scale
        out[own] = (scores.softmax(-1) @ latents[:, :latent_dim]).to(out.dtype)
        lse[own] = scores.logsumexp(-1) / math.log(2)


def latent_prompt(
    query: torch.Tensor,
    expanded: torch.Tensor,
    shared: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Each row's own tokens, causally, beside what `out` holds; arguments as for the launcher."""
    nope_dim = query.shape[2] - shared.shape[1]
    starts = query_start.tolist()
    for begin, end in itertools.pairwise(starts):
        both = expanded[begin:end].float()
        turned = shared[begin:end, None].float().expand(-1, both.shape[1], -1)
        key = torch.cat([both[..., :nope_dim], turned], dim=-1)
        scores = torch.einsum("qhd,khd->qhk", query[begin:end].float(), key) * scale
        places = torch.arange(end - begin, device=query.device)
        scores = scores.masked_fill(places > places[:, None, None], float("-inf"))
        value = both[..., nope_dim:].transpose(0, 1)
        if lse is not None:
            earlier = lse[begin:end, :, None] * math.log(2)
            kept = out[begin:end].float().masked_fill(earlier == float("-inf"), 0.0)
            scores = torch.cat([scores, earlier], dim=-1)
        weights = scores.softmax(-1)
        mixed = torch.einsum("qhk,hkv->qhv", weights[..., : end - begin], value)
        if lse is not None:
            mixed += weights[..., end - begin :] * kept
        out[begin:end] = mixed.to(out.dtype)
