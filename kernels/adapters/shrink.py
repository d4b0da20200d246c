"""The first product of adapters: every rank of a token's adapter times its input.

    low[split, t, lane] = the split's part of A[lane] x[t]

The lanes of an adapter are the ranks of the site's parts one after the other: 24 for ranks of 16, 0
and 8. So parts with fewer ranks, or none, cost nothing. One program: a block of lanes, a split of
the inputs, a chunk of tokens. Sums of a split are float32; expand.py adds them in their order.
Lanes take the tensor core's long side; a step of one row is multiplied without it.

Memory: A once per chunk of its adapter, x once per block of lanes; 4 bytes per split, token and
lane are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..tiles import load_tile, prefetch_l2_rows
from .tiles import UNROLLED, AdapterTiles, split_steps


@triton.jit
def _lanes_of(ranks_ptr, lanes, PARTS: tl.constexpr):
    """Return the part and the rank of each lane of an adapter, and how many lanes it has."""
    part = tl.zeros(lanes.shape, tl.int32)
    first = tl.zeros(lanes.shape, tl.int32)
    count = tl.full([], 0, tl.int32)
    for number in tl.static_range(PARTS):
        count += tl.load(ranks_ptr + number)
        part = tl.where(lanes >= count, number + 1, part)
        first = tl.where(lanes >= count, count, first)
    return tl.minimum(part, PARTS - 1), lanes - first, count


@triton.jit
def _prefetch(
    a_ptr,
    places_ptr,
    rank_rows_ptr,
    ranks_ptr,
    num_places,
    num_rows,
    stride_row,
    stride_part,
    stride_rank_rows,
    stride_ranks,
    first_lane,
    first_input,
    PARTS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Ask the L2 cache for the program's part of A, by tables that may not be written yet: then for
    other numbers of A, with no other harm."""
    place = tl.load(places_ptr + tl.program_id(1), cache_modifier=".cg")
    if (place >= 0) & (place < num_places):
        for start in tl.static_range(0, BLOCK_L, 32):
            lanes = first_lane + start + tl.arange(0, 32)
            part, rank, count = _lanes_of(ranks_ptr + place * stride_ranks, lanes, PARTS)
            mask = (lanes < count) & (lanes < first_lane + BLOCK_L)
            rows = tl.load(rank_rows_ptr + place * stride_rank_rows + rank, mask=mask, other=0)
            rows = tl.minimum(tl.maximum(rows, 0), num_rows - 1).to(tl.int64)
            ptrs = a_ptr + rows * stride_row + part * stride_part + first_input
            prefetch_l2_rows(ptrs, mask, BYTES)


@triton.jit
def _add_product(
    acc,
    a_ptrs,
    x_ptrs,
    in_l,
    in_t,
    k,
    start,
    INPUTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROW: tl.constexpr,
):
    """Return acc + A xᵀ of the inputs start + k; of a single row, their products."""
    in_k = start + k < INPUTS
    a = load_tile(a_ptrs + start, in_l, in_k, False, EVEN_K, "")
    if ROW:
        x = tl.load(x_ptrs + start, mask=in_k, other=0.0)
        return acc + a.to(tl.float32) * x.to(tl.float32)[None, :]
    else:
        x = load_tile(x_ptrs + start, in_t, in_k, False, EVEN_K, "")
        if a.dtype == x.dtype and a.dtype.primitive_bitwidth == 16:
            return tl.dot(a, tl.trans(x), acc)
        else:
            x = tl.trans(x.to(tl.float32))
            return tl.dot(a.to(tl.float32), x, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens", "num_places", "num_rows", "stride_ranks"])
def _shrink_kernel(
    low_ptr,
    x_ptr,
    places_ptr,
    tokens_ptr,
    a_ptr,
    rank_rows_ptr,
    ranks_ptr,
    num_tokens,
    num_places,
    num_rows,
    stride_low,
    stride_x,
    stride_row,
    stride_part,
    stride_rank_rows,
    stride_ranks,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLLED: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_L lanes, STEPS * BLOCK_K inputs, a chunk."""
    EVEN_K: tl.constexpr = INPUTS == SPLITS * STEPS * BLOCK_K
    split = tl.program_id(0) % SPLITS
    first_lane = tl.program_id(0) // SPLITS * BLOCK_L
    first_input = split * (STEPS * BLOCK_K)
    if PREFETCH is not None:
        _prefetch(
            a_ptr, places_ptr, rank_rows_ptr, ranks_ptr, num_places, num_rows, stride_row,
            stride_part, stride_rank_rows, stride_ranks, first_lane, first_input, PARTS, BLOCK_L,
            PREFETCH,
        )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.load(places_ptr + tl.program_id(1))
    if place < 0:
        return
    lanes = first_lane + tl.arange(0, BLOCK_L)
    part, rank, count = _lanes_of(ranks_ptr + place * stride_ranks, lanes, PARTS)
    if first_lane >= count:
        return
    in_l = lanes < count
    rows = tl.load(rank_rows_ptr + place * stride_rank_rows + rank, mask=in_l, other=0)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (rows.to(tl.int64) * stride_row + part * stride_part)[:, None]
    a_ptrs += first_input + k[None, :]
    k += first_input

    offset = tl.arange(0, BLOCK_T)
    tokens = tl.load(tokens_ptr + tl.program_id(1) * CHUNK + offset, mask=offset < CHUNK, other=-1)
    if ROW:
        token = tl.max(tokens, axis=0)
        if token < 0:
            return
        in_t = in_l
        x_ptrs = x_ptr + k
        acc = tl.zeros([BLOCK_L, BLOCK_K], tl.float32)
    else:
        in_t = tokens >= 0
        x_ptrs = x_ptr + tl.maximum(tokens, 0).to(tl.int64)[:, None] * stride_x + k[None, :]
        acc = tl.zeros([BLOCK_L, BLOCK_T], tl.float32)
    if STEPS <= UNROLLED:
        for step in tl.static_range(STEPS):
            acc = _add_product(
                acc, a_ptrs, x_ptrs, in_l, in_t, k, step * BLOCK_K, INPUTS, EVEN_K, ROW
            )
    else:
        for step in tl.range(STEPS, num_stages=STAGES):
            acc = _add_product(
                acc, a_ptrs, x_ptrs, in_l, in_t, k, step * BLOCK_K, INPUTS, EVEN_K, ROW
            )
    low_ptr += split.to(tl.int64) * num_tokens * stride_low
    if ROW:
        tl.store(low_ptr + lanes, tl.sum(acc, axis=1), mask=in_l)
    else:
        low_ptrs = low_ptr + tokens.to(tl.int64)[None, :] * stride_low + lanes[:, None]
        tl.store(low_ptrs, acc, mask=in_l[:, None] & in_t[None, :])


def shrink(
    x: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    a: torch.Tensor,
    rank_rows: torch.Tensor,
    ranks: torch.Tensor,
    tiles: AdapterTiles,
) -> torch.Tensor:
    """x: [T, K], last stride 1; places: [C] and tokens: [C, tokens of a chunk] int32; a: [rank
    rows, S, K], last stride 1; rank_rows: [P, most ranks] and ranks: [P, S] int32, last stride
    1 → [splits, T, S * most ranks] float32, of which the lanes of tokens in chunks are written."""
    (num_tokens, inputs), (num_chunks, chunk_tokens) = x.shape, tokens.shape
    (num_rows, parts, _), (num_places, most_ranks) = a.shape, rank_rows.shape
    splits, steps = split_steps(tiles, inputs)
    most_lanes = parts * most_ranks
    low = torch.empty((splits, num_tokens, most_lanes), dtype=torch.float32, device=x.device)
    options = pdl_options(x.device)
    item = a.element_size()
    aligned = all(size * item % 16 == 0 for size in (inputs, a.stride(0), a.stride(1)))
    aligned = aligned and a.data_ptr() % 16 == 0 and inputs % (steps * tiles.block_k) == 0
    prefetch = bool(options) and tiles.prefetch and aligned
    launch(_shrink_kernel, (splits * triton.cdiv(most_lanes, tiles.lanes), num_chunks))(
        low,
        x,
        places,
        tokens,
        a,
        rank_rows,
        ranks,
        num_tokens,
        num_places,
        num_rows,
        most_lanes,
        x.stride(0),
        a.stride(0),
        a.stride(1),
        rank_rows.stride(0),
        ranks.stride(0),
        INPUTS=inputs,
        PARTS=parts,
        CHUNK=chunk_tokens,
        SPLITS=splits,
        STEPS=steps,
        ROW=num_tokens == 1,
        BLOCK_L=tiles.lanes,
        BLOCK_T=max(triton.next_power_of_2(chunk_tokens), 16),
        BLOCK_K=tiles.block_k,
        UNROLLED=UNROLLED,
        STAGES=tiles.shrink_stages,
        PREFETCH=str(steps * tiles.block_k * item) if prefetch else None,
        PDL=bool(options),
        num_warps=tiles.shrink_warps,
        **options,
    )
    return low
