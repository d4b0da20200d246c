"""The first product of adapters: every rank of a token's adapter times its input.

    low[split, t, lane] = the split's part of A[lane] x[t]

The lanes of an adapter are the ranks of the site's parts one after the other: 24 for ranks of 16, 0
and 8. So parts with fewer ranks, or none, cost nothing. One program: a block of lanes, a split of
the inputs, a chunk of tokens. Sums of a split are float32; expand.py adds them in their order.
Lanes take the tensor core's long side; a step of one row is multiplied without it, and may have an
RMSNorm before it: A (w x) is summed here, and so are the squares of x, by which expand.py divides.

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
from .tiles import UNROLLED, AdapterTiles, split_inputs


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
def _a_of(
    a_ptr,
    rank_rows_ptr,
    ranks_ptr,
    place,
    lanes,
    num_rows,
    stride_row,
    stride_part,
    stride_rank_rows,
    stride_ranks,
    PARTS: tl.constexpr,
):
    """Return where each lane of an adapter begins in A, and how many there are. Whatever tables
    say, it is a row of A."""
    part, rank, count = _lanes_of(ranks_ptr + place * stride_ranks, lanes, PARTS)
    rows = tl.load(rank_rows_ptr + place * stride_rank_rows + rank, mask=lanes < count, other=0)
    rows = tl.minimum(tl.maximum(rows, 0), num_rows - 1).to(tl.int64)
    return a_ptr + rows * stride_row + part * stride_part, count


@triton.jit
def _add_row(acc, squares, a, x_ptrs, norm_ptr, at, in_k, NORM: tl.constexpr):
    """Add the products of a tile of inputs, of a single row; and the inputs' squares."""
    x = tl.load(x_ptrs, mask=in_k, other=0.0).to(tl.float32)
    if NORM:
        squares += x * x
        x *= tl.load(norm_ptr + at, mask=in_k, other=0.0).to(tl.float32)
    return acc + a.to(tl.float32) * x[None, :], squares


@triton.jit
def _add_product(acc, a, x_ptrs, in_t, in_k, EVEN_K: tl.constexpr):
    """Return acc + A xᵀ of a tile of inputs."""
    x = load_tile(x_ptrs, in_t, in_k, False, EVEN_K, "")
    if a.dtype == x.dtype and a.dtype.primitive_bitwidth == 16:
        return tl.dot(a, tl.trans(x), acc)
    else:
        x = tl.trans(x.to(tl.float32))
        return tl.dot(a.to(tl.float32), x, acc, input_precision="ieee")


@triton.jit
def _add_tile(
    acc,
    squares,
    a,
    x_ptrs,
    norm_ptr,
    at,
    in_t,
    in_k,
    EVEN_K: tl.constexpr,
    ROW: tl.constexpr,
    NORM: tl.constexpr,
):
    """Add a tile of inputs."""
    if ROW:
        return _add_row(acc, squares, a, x_ptrs, norm_ptr, at, in_k, NORM)
    else:
        return _add_product(acc, a, x_ptrs, in_t, in_k, EVEN_K), squares


@triton.jit(do_not_specialize=["num_tokens", "num_places", "num_rows", "stride_ranks"])
def _shrink_kernel(
    low_ptr,
    x_ptr,
    places_ptr,
    tokens_ptr,
    a_ptr,
    rank_rows_ptr,
    ranks_ptr,
    squares_ptr,
    norm_ptr,
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
    NORM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLLED: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_L lanes, STEPS * BLOCK_K inputs, a chunk."""
    EVEN_K: tl.constexpr = INPUTS == SPLITS * STEPS * BLOCK_K
    split = tl.program_id(0) % SPLITS
    first_lane = tl.program_id(0) // SPLITS * BLOCK_L
    lanes = first_lane + tl.arange(0, BLOCK_L)
    k = split * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    if EARLY:
        # The chunks were made some kernels ago, but nothing says that the last one before this has
        # waited for them. So the place is read past the cache that it is read from below, and if it
        # is another one then, what was loaded by it is loaded again.
        early = tl.load(places_ptr + tl.program_id(1), cache_modifier=".cg")
        early = tl.minimum(tl.maximum(early, 0), num_places - 1)
        starts, count = _a_of(
            a_ptr, rank_rows_ptr, ranks_ptr, early, lanes, num_rows, stride_row, stride_part,
            stride_rank_rows, stride_ranks, PARTS,
        )  # fmt: skip
        if PREFETCH is not None:
            prefetch_l2_rows(starts + split * (STEPS * BLOCK_K), lanes < count, PREFETCH)
        else:
            a_ptrs = starts[:, None] + k[None, :]
            a = load_tile(a_ptrs, lanes < count, k < INPUTS, False, EVEN_K, "")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.load(places_ptr + tl.program_id(1))
    if place < 0:
        return
    if EARLY:
        if place != early:
            starts, count = _a_of(
                a_ptr, rank_rows_ptr, ranks_ptr, place, lanes, num_rows, stride_row, stride_part,
                stride_rank_rows, stride_ranks, PARTS,
            )  # fmt: skip
            if PREFETCH is None:
                a_ptrs = starts[:, None] + k[None, :]
                a = load_tile(a_ptrs, lanes < count, k < INPUTS, False, EVEN_K, "")
    else:
        starts, count = _a_of(
            a_ptr, rank_rows_ptr, ranks_ptr, place, lanes, num_rows, stride_row, stride_part,
            stride_rank_rows, stride_ranks, PARTS,
        )  # fmt: skip
    if first_lane >= count:
        return
    in_l = lanes < count
    a_ptrs = starts[:, None] + k[None, :]
    offset = tl.arange(0, BLOCK_T)
    tokens = tl.load(tokens_ptr + tl.program_id(1) * CHUNK + offset, mask=offset < CHUNK, other=-1)
    if ROW:
        in_t = in_l
        x_ptrs = x_ptr + k
        acc = tl.zeros([BLOCK_L, BLOCK_K], tl.float32)
    else:
        in_t = tokens >= 0
        x_ptrs = x_ptr + tl.maximum(tokens, 0).to(tl.int64)[:, None] * stride_x + k[None, :]
        acc = tl.zeros([BLOCK_L, BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    if EARLY and PREFETCH is None:
        acc, squares = _add_tile(
            acc, squares, a, x_ptrs, norm_ptr, k, in_t, k < INPUTS, EVEN_K, ROW, NORM
        )
    elif STEPS <= UNROLLED:
        for step in tl.static_range(STEPS):
            in_k = k + step * BLOCK_K < INPUTS
            a = load_tile(a_ptrs + step * BLOCK_K, in_l, in_k, False, EVEN_K, "")
            acc, squares = _add_tile(
                acc, squares, a, x_ptrs + step * BLOCK_K, norm_ptr, k + step * BLOCK_K, in_t, in_k,
                EVEN_K, ROW, NORM,
            )  # fmt: skip
    else:
        for step in tl.range(STEPS, num_stages=STAGES):
            in_k = k + step * BLOCK_K < INPUTS
            a = load_tile(a_ptrs + step * BLOCK_K, in_l, in_k, False, EVEN_K, "")
            acc, squares = _add_tile(
                acc, squares, a, x_ptrs + step * BLOCK_K, norm_ptr, k + step * BLOCK_K, in_t, in_k,
                EVEN_K, ROW, NORM,
            )  # fmt: skip
    low_ptr += split.to(tl.int64) * num_tokens * stride_low
    if ROW:
        has_token = tl.max(tokens, axis=0) >= 0
        tl.store(low_ptr + lanes, tl.sum(acc, axis=1), mask=in_l & has_token)
        if NORM:
            # Of each block of lanes the same number.
            tl.store(squares_ptr + split, tl.sum(squares, axis=0))
    else:
        low_ptrs = low_ptr + tokens.to(tl.int64)[None, :] * stride_low + lanes[:, None]
        tl.store(low_ptrs, acc, mask=in_l[:, None] & in_t[None, :])


def _asks(a: torch.Tensor, num_bytes: int, lanes: int) -> bool:
    """Return whether one instruction for each lane can ask for so many bytes of its part of A."""
    item, (_, _, inputs) = a.element_size(), a.shape
    sizes = (a.data_ptr(), a.stride(0) * item, a.stride(1) * item, num_bytes)
    return lanes <= 32 and inputs * item % num_bytes == 0 and all(one % 16 == 0 for one in sizes)


def shrink(
    x: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    a: torch.Tensor,
    rank_rows: torch.Tensor,
    ranks: torch.Tensor,
    tiles: AdapterTiles,
    norm_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x: [T, K], last stride 1; places: [C] and tokens: [C, tokens of a chunk] int32; a: [rank
    rows, S, K], last stride 1; rank_rows: [P, most ranks] and ranks: [P, S] int32, last stride
    1; norm_weight: [K], of a norm before a single row → [splits, T, S * most ranks] float32, of
    which the lanes of tokens in chunks are written; and with a norm, the sum of each split's
    squares, [splits] float32, written if there is any lane."""
    (num_tokens, inputs), (num_chunks, chunk_tokens) = x.shape, tokens.shape
    (num_rows, parts, _), (num_places, most_ranks) = a.shape, rank_rows.shape
    splits, steps, block_k = split_inputs(tiles, inputs)
    most_lanes = parts * most_ranks
    low = torch.empty((splits, num_tokens, most_lanes), dtype=torch.float32, device=x.device)
    squares = None if norm_weight is None else low.new_empty(splits)
    options = pdl_options(x.device)
    num_bytes = steps * block_k * a.element_size()
    prefetch = steps > 1
    early = tiles.early and (not prefetch or (bool(options) and _asks(a, num_bytes, tiles.lanes)))
    launch(_shrink_kernel, (splits * triton.cdiv(most_lanes, tiles.lanes), num_chunks))(
        low,
        x,
        places,
        tokens,
        a,
        rank_rows,
        ranks,
        squares,
        norm_weight,
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
        NORM=norm_weight is not None,
        BLOCK_L=tiles.lanes,
        BLOCK_T=max(triton.next_power_of_2(chunk_tokens), 16),
        BLOCK_K=block_k,
        UNROLLED=UNROLLED,
        STAGES=tiles.shrink_stages,
        EARLY=early,
        PREFETCH=str(num_bytes) if early and prefetch else None,
        PDL=bool(options),
        num_warps=tiles.shrink_warps,
        **options,
    )
    return low, squares
