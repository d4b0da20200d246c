"""Decode attention over a paged cache: one query per row, or as many of each (drafts), whose keys
are split over programs.

A row's queries, and the query heads that share a key head (GQA), form the rows of one matrix
product, so each key and value is read once. A second kernel joins the splits by their log-sum-exp.

Memory: 2 * sum(seq_lens) * num_kv_heads * head_dim elements read (bound by this), and
num_rows * num_heads * num_splits * (head_dim + 1) floats written and read when split.
Operations: 4 * sum(seq_lens) * num_heads * head_dim.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .decode_codes import (
    add_code_values,
    code_scores,
    decode_width,
    load_codes,
    load_query_parts,
    product_starts,
    whole_halves,
    zero_parts,
)
from .decode_floats import soft_capped
from .decode_splits import (
    MIN_SPLIT_TILES,
    DecodeConfig,
    _join_kernel,
    _split_tiles,
    decode_config,
    workspace_elements,
)
from .quantized_tiles import (
    Quantized,
    block_width,
    cache_arguments,
    is_narrow,
    product_dtype,
    product_query,
    widen_floats,
)
from .reach import last_hidden, reach_constants
from .shared_prefix import PrefixSums, prefix_length, prefix_sums


@triton.jit(
    do_not_specialize=["prefix_num_splits", "num_splits", "stride_table"],
    do_not_specialize_on_alignment=["prefix_ptr"],
)
def _decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_words_ptr,
    value_words_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    slopes_ptr,
    sinks_ptr,
    prefix_ptr,
    prefix_partial_ptr,
    prefix_lse_ptr,
    scale,
    value_scale,
    prefix_num_splits,
    num_splits,
    width,
    stride_out_row,
    stride_out_head,
    stride_query_row,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DISTANCES: tl.constexpr,
    SINKS: tl.constexpr,
    SHARED: tl.constexpr,
    SPLIT: tl.constexpr,
    MIXED: tl.constexpr,
    SEVERAL: tl.constexpr,
    MIN_TILES: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, kv head, split). SEVERAL: each row has `width` queries, its last
    positions. SHARED: a row's first split takes in the sums of the prefix. Scores are in units of
    log2."""
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_wait()
    if MIXED:
        # Only the leading rows of one token each are computed.
        if tl.load(query_start_ptr + row + 1) != row + 1:
            return
    seq_len = tl.load(seq_lens_ptr + row)
    prefix = prefix_length(prefix_ptr) if SHARED else 0
    lower, first, end, per_split = _split_tiles(
        seq_len, width, prefix, num_splits, BLOCK_N, MIN_TILES, WINDOW, CHUNK
    )
    begin_tile = first + split * per_split
    end_tile = tl.minimum(begin_tile + per_split, end)
    if SPLIT:
        if begin_tile >= end_tile:
            return

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_k = offs_k < KEY_WIDTH
    mask_v = offs_v < VALUE_WIDTH
    row64 = row.to(tl.int64)
    if SEVERAL:
        used = offs_m < width * GROUP
        head = kv_head * GROUP + offs_m % GROUP
        token = row64 * width + offs_m // GROUP
        position_q = (seq_len - width + offs_m // GROUP)[:, None]
    else:
        used = offs_m < GROUP
        head = kv_head * GROUP + offs_m
        token = row64
        position_q = seq_len - 1
    mask_q = used[:, None] & mask_k[None, :]
    source = query_ptr + (token * stride_query_row + head * stride_query_head)[:, None]
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    kind: tl.constexpr = product_dtype(key_cache_ptr.dtype.element_ty, dtype)
    LOG2E: tl.constexpr = 1.4426950408889634
    # Scores of codes are in units of log2 from the start, if nothing is added to them.
    LOGS: tl.constexpr = KEY_BITS < 16 and SOFT_CAP == 0.0 and not ALIBI and DISTANCES == 0
    if KEY_BITS == 16:
        query = tl.load(source + offs_k[None, :], mask=mask_q, other=0.0)
        query = product_query(query, kind)
    else:
        query = load_query_parts(source, used[:, None], kind, KEY_BITS, KEY_WIDTH, BLOCK_K // 2)
        factor = scale * LOG2E if LOGS else scale
        low, high, query_sum = product_starts(query, KEY_BITS)
        query_sum *= factor

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if VALUE_BITS == 16:
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        if SHARED:
            if split == 0:
                acc, m, total = prefix_sums(
                    prefix_partial_ptr, prefix_lse_ptr, prefix, token, head, used,
                    prefix_num_splits, NUM_HEADS, HEAD_DIM, BLOCK_M, BLOCK_V,
                )  # fmt: skip
        acc_high = acc
    else:
        parts = zero_parts(BLOCK_M, BLOCK_V // 2, VALUE_BITS)
        totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        missing = totals
    table = block_table_ptr + row64 * stride_table
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=used, other=0.0)
    for tile in range(begin_tile, end_tile):
        position = tile * BLOCK_N + offs_n
        if KEY_BITS == 16:
            valid = (position >= lower) & (position < seq_len)
            block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
            base = (
                block * stride_block + (position % BLOCK_SIZE) * stride_slot + kv_head * stride_head
            )
            key_places = base[:, None] + offs_k[None, :]
            mask_keys = valid[:, None] & mask_k[None, :]
            key = tl.load(key_cache_ptr + key_places, mask=mask_keys, other=0.0)
            value = tl.load(value_cache_ptr + key_places, mask=mask_keys, other=0.0)
            key = widen_floats(key, query.dtype, True)
            value = widen_floats(value, query.dtype, False)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        else:
            valid = position < seq_len
            if WINDOW > 0:
                valid = valid & (position >= lower)
            key, value, key_words, value_words = load_codes(
                key_cache_ptr, value_cache_ptr, key_words_ptr, value_words_ptr, table, tile, offs_n,
                valid, lower, seq_len - 1, kv_head, NUM_KV_HEADS, BLOCK_SIZE, WINDOW, KEY_WIDTH,
                VALUE_WIDTH, BLOCK_N, BLOCK_K // 2, BLOCK_V // 2,
            )  # fmt: skip
            scores = code_scores(query, low, high, query_sum, key, key_words, factor, KEY_BITS)
        scores = soft_capped(scores, SOFT_CAP)
        if ALIBI:
            scores += slope[:, None] * (position[None, :] - position_q)
        if DISTANCES > 0:
            away = tl.minimum(tl.maximum(position_q - position[None, :], 0), DISTANCES - 1)
            places = head[:, None] * DISTANCES + away
            bias = tl.load(slopes_ptr + places, mask=used[:, None], other=0.0)
            scores += bias.to(tl.float32)
        LOG: tl.constexpr = 1.0 if LOGS else LOG2E
        seen = valid[None, :]
        if SEVERAL:
            seen = seen & (position[None, :] <= position_q)
            if WINDOW > 0:
                seen = seen & (position[None, :] > last_hidden(position_q, WINDOW, CHUNK))
        scores = tl.where(seen, scores * LOG, -float("inf"))
        # A tile always holds a position that the newest query sees, so its m_new is finite.
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        highest = m_new
        if SEVERAL:
            highest = tl.where(m_new == -float("inf"), 0.0, m_new)
        weights = tl.exp2(scores - highest[:, None])
        decay = tl.exp2(m - highest)
        if VALUE_BITS == 16:
            total = total * decay + tl.sum(weights, axis=1)
            acc = acc * decay[:, None]
            acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        else:
            parts, more = add_code_values(
                parts, decay, weights, value, value_words, dtype, VALUE_BITS
            )
            # Summed over the columns once, after the last tile.
            totals = totals * decay[:, None] + weights
            missing = missing * decay[:, None] + more
        m = m_new

    if PDL:
        gdc_launch_dependents()
    if VALUE_BITS < 16:
        acc, acc_high = whole_halves(parts, VALUE_BITS)
        total = tl.sum(totals, axis=1)
        rest = tl.sum(missing, axis=1)[:, None]
        acc += rest
        acc_high += rest
    if SINKS and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        decay = tl.exp2(m - m_new)
        total = total * decay + tl.exp2(sink - m_new)
        acc = acc * decay[:, None]
        acc_high = acc_high * decay[:, None]
    # A row of length 0 (padding) has total 0 and gives zeros.
    factor = (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    acc = acc * factor
    mask_out = used[:, None] & mask_v[None, :]
    at = (token * NUM_HEADS + head) * num_splits + split
    if SPLIT:
        tl.store(lse_ptr + at, m + tl.log2(total), mask=used)
        target = partial_ptr + at[:, None] * HEAD_DIM + offs_v[None, :]
    else:
        target = out_ptr + (token * stride_out_row + head * stride_out_head)[:, None]
        target += offs_v[None, :]
    tl.store(target, acc.to(target.dtype.element_ty), mask=mask_out)
    if VALUE_BITS == 4:
        acc_high = (acc_high * factor).to(target.dtype.element_ty)
        tl.store(target + VALUE_WIDTH, acc_high, mask=mask_out)


def paged_attention_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor | Quantized,
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
    num_splits: int = 1,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    query_start: torch.Tensor | None = None,
    width: int = 1,
    prefix: PrefixSums | None = None,
) -> torch.Tensor:
    """query: [num_rows * width, num_heads, head_dim], each row's last tokens → the same shape.

    kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], of query's type (float16,
    bfloat16 or float32), or fp8 that is multiplied by `cache_scales` (keys, values); or quantized.
    block_table: [num_rows, max_blocks] int32; seq_lens: [num_rows] int32, including the queries'
    own tokens. Last strides are 1, others free. alibi_slopes: [num_heads] float32, times (key's
    position - query's) added to the logits; distance_bias, in place of them: [num_heads,
    num_distances], contiguous, added by the distance to the key, the last one from there on; sinks:
    [num_heads], one additional logit per head in the softmax's sum. `workspace`: float32, at least
    `workspace_elements(...)` of num_rows * width, contents free; None: allocated here. Blocks
    beyond a row's length, or before its window or chunks, are never read, and of floats no such
    position; codes of these positions in a row's own blocks are multiplied by zero. query_start:
    [at least num_rows + 1] int32; if given, width is 1, and only the leading rows with
    query_start[row + 1] = row + 1 are computed. prefix: of `attend_prefix`, for rows of one token
    without a window, chunks or biases over a cache of query's type. No host synchronisation; safe
    to capture.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_rows = num_tokens // width
    cache = cache_arguments(kv_cache)
    num_kv_heads = cache.num_kv_heads
    out = torch.empty_like(query) if out is None else out
    if num_rows == 0:
        return out
    if cache.key_bits == 8 and head_dim > 256 and query.dtype == torch.float32 and query.is_cuda:
        # On an H200 the results were wrong; why is not known.
        raise ValueError(
            f"float32 heads of {head_dim} channels cannot be read from 8 bits on a GPU: take "
            "bfloat16 or float16, or a cache of the model's type"
        )
    reach = reach_constants(sliding_window, attention_chunk_size, chunk_lookback)
    group = num_heads // num_kv_heads
    key_width, value_width = cache.key_width(head_dim), cache.value_width(head_dim)
    block_n, num_warps, num_stages = config or decode_config(
        head_dim, query.dtype, num_rows * num_kv_heads, is_narrow(kv_cache)
    )
    length, prefix_partial, prefix_lse, prefix_num_splits = prefix or (seq_lens, out, out, 1)
    partial = lse = out
    if num_splits > 1:
        needed = workspace_elements(num_tokens, num_heads, head_dim, num_splits)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.float32, device=query.device)
        if workspace.numel() < needed:
            raise ValueError(
                f"workspace has {workspace.numel()} elements; {num_tokens} tokens in {num_splits} "
                f"splits need {needed}"
            )
        partial = workspace
        lse = workspace[num_tokens * num_heads * num_splits * head_dim :]
    # A kernel that runs beside another stream's has no predecessor to overlap with.
    options = {} if query_start is not None else pdl_options(query.device)
    launch(_decode_kernel, (num_rows, num_kv_heads, num_splits))(
        out,
        partial,
        lse,
        query,
        *cache.tensors,
        block_table,
        seq_lens,
        seq_lens if query_start is None else query_start,
        next(part for part in (alibi_slopes, distance_bias, seq_lens) if part is not None),
        seq_lens if sinks is None else sinks,
        length,
        prefix_partial,
        prefix_lse,
        scale * cache_scales[0],
        cache_scales[1],
        prefix_num_splits,
        num_splits,
        width,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        *cache.strides,
        block_table.stride(0),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        **reach,
        SOFT_CAP=soft_cap or 0.0,
        ALIBI=alibi_slopes is not None,
        DISTANCES=0 if distance_bias is None else distance_bias.shape[1],
        SINKS=sinks is not None,
        SHARED=prefix is not None,
        SPLIT=num_splits > 1,
        MIXED=query_start is not None,
        SEVERAL=width > 1,
        MIN_TILES=MIN_SPLIT_TILES,
        **cache.constants(head_dim),
        BLOCK_M=max(16, triton.next_power_of_2(group * width)),
        BLOCK_N=block_n,
        BLOCK_K=decode_width(key_width, cache.key_bits),
        BLOCK_V=decode_width(value_width, cache.value_bits),
        PDL=bool(options),
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
    )
    if num_splits > 1:
        block_s, block_d = triton.next_power_of_2(num_splits), block_width(head_dim)
        launch(_join_kernel, (num_tokens, num_heads))(
            out,
            partial,
            lse,
            seq_lens,
            seq_lens if query_start is None else query_start,
            seq_lens if sinks is None else sinks,
            length,
            num_splits,
            width,
            out.stride(0),
            out.stride(1),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            **reach,
            SINKS=sinks is not None,
            SHARED=prefix is not None,
            MIXED=query_start is not None,
            MIN_TILES=MIN_SPLIT_TILES,
            BLOCK_N=block_n,
            BLOCK_S=block_s,
            BLOCK_D=block_d,
            PDL=bool(options),
            num_warps=4 if block_s * block_d <= 1 << 14 else 8,
            **options,
        )
    return out
