"""The second product of adapters: B times the ranks' sums, added to a layer's output.

    out[t, n] += Σ over ranks r of B[r, n] * scale * Σ over splits of low[split, t, r]

One program: a block of outputs of one part, a chunk of tokens. The sum is float32, and `out`, the
base layer's rounded result, is rounded once more. Outputs take the tensor core's long side; a step
of one row is multiplied without it.

Memory: B once per chunk of its adapter; `out` read and written once, for tokens in chunks alone.
With programmatic dependent launch, B and `out` are loaded while the first product still runs:
shrink.py lets this kernel begin only after every kernel before it has ended.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .tiles import AdapterTiles


@triton.jit
def _load_b(b_ptr, rank_rows_ptr, stride_b, ranks, count, offs_n, in_n):
    """Return B of some ranks, [BLOCK_R, BLOCK_N]; zeros of those that the part does not have."""
    in_r = ranks < count
    rows = tl.load(rank_rows_ptr + ranks, mask=in_r, other=0).to(tl.int64)
    ptrs = b_ptr + rows[:, None] * stride_b + offs_n[None, :]
    return tl.load(ptrs, mask=in_r[:, None] & in_n[None, :], other=0.0)


@triton.jit
def _load_low(low_ptrs, mask, stride_split, SPLITS: tl.constexpr):
    """Return the sum over splits, in their order."""
    low = tl.load(low_ptrs, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        low += tl.load(low_ptrs + split * stride_split, mask=mask, other=0.0)
    return low


@triton.jit
def _add_product(acc, b, low):
    """Return acc + bᵀ low, [BLOCK_N, BLOCK_T], with low's numbers as good as in float32."""
    b = tl.trans(b)
    if b.dtype == tl.bfloat16:
        high = low.to(tl.bfloat16)
        rest = (low - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(b, rest, tl.dot(b, high, acc))
    elif b.dtype == tl.float16:
        # All that float16 has is in tf32, with room for low's greater numbers.
        return tl.dot(b.to(tl.float32), low, acc, input_precision="tf32x3")
    else:
        return tl.dot(b, low, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens", "stride_ranks", "stride_scales"])
def _expand_kernel(
    out_ptr,
    low_ptr,
    places_ptr,
    tokens_ptr,
    b_ptr,
    rank_rows_ptr,
    ranks_ptr,
    scales_ptr,
    squares_ptr,
    eps,
    num_tokens,
    stride_out,
    stride_low,
    stride_b,
    stride_rank_rows,
    stride_ranks,
    stride_scales,
    BOUNDS: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    ROW: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs, a chunk. TILES: the first tile of each part; NORMED: the inputs
    of a norm before the first product."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    place = tl.load(places_ptr + chunk)
    used = place >= 0
    rank_rows_ptr += tl.maximum(place, 0) * stride_rank_rows
    ranks_ptr += tl.maximum(place, 0) * stride_ranks
    scales_ptr += tl.maximum(place, 0) * stride_scales
    # The part, its outputs, and its lanes.
    first_n = BOUNDS[0] + tile * BLOCK_N
    end_n = tl.full([], BOUNDS[1], tl.int32)
    first_lane = tl.full([], 0, tl.int32)
    part = tl.full([], 0, tl.int32)
    for number in tl.static_range(1, PARTS):
        earlier = tl.load(ranks_ptr + number - 1)
        if tile >= TILES[number]:
            first_n = BOUNDS[number] + (tile - TILES[number]) * BLOCK_N
            end_n = tl.full([], BOUNDS[number + 1], tl.int32)
            first_lane += earlier
            part = tl.full([], number, tl.int32)
    count = tl.load(ranks_ptr + part)
    count = tl.where(used, count, 0)
    scale = tl.load(scales_ptr + part)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    in_n = offs_n < end_n
    ranks = tl.arange(0, BLOCK_R)
    offset = tl.arange(0, BLOCK_T)
    tokens = tl.load(tokens_ptr + chunk * CHUNK + offset, mask=offset < CHUNK, other=-1)
    # What the first product has not made is loaded before it ends.
    b = _load_b(b_ptr, rank_rows_ptr, stride_b, ranks, count, offs_n, in_n)
    if ROW:
        token = tl.max(tokens, axis=0)
        out_ptrs = out_ptr + offs_n
        mask = in_n & (token >= 0) & (count > 0)
    else:
        out_ptrs = out_ptr + tl.maximum(tokens, 0).to(tl.int64)[None, :] * stride_out
        out_ptrs += offs_n[:, None]
        mask = in_n[:, None] & (tokens >= 0)[None, :] & (count > 0)
    out = tl.load(out_ptrs, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if count == 0:
        return
    stride_split = num_tokens.to(tl.int64) * stride_low
    if ROW:
        acc = tl.zeros([BLOCK_N], tl.float32)
        splits = tl.arange(0, BLOCK_SPLITS)
        if NORMED is not None:
            squares = tl.load(squares_ptr + splits, mask=splits < SPLITS, other=0.0)
            scale *= tl.rsqrt(tl.sum(squares, axis=0) / NORMED + eps)
        low_ptrs = low_ptr + splits.to(tl.int64)[:, None] * stride_split + first_lane
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        low_ptrs = low_ptr + tl.maximum(tokens, 0).to(tl.int64)[None, :] * stride_low + first_lane
    # Almost always once: nothing to pipeline.
    for start in tl.range(0, count, BLOCK_R, num_stages=1):
        lanes = start + ranks
        if start > 0:
            b = _load_b(b_ptr, rank_rows_ptr, stride_b, lanes, count, offs_n, in_n)
        in_r = lanes < count
        if ROW:
            in_low = (splits < SPLITS)[:, None] & in_r[None, :] & (token >= 0)
            low = tl.load(low_ptrs + lanes[None, :], mask=in_low, other=0.0)
            low = tl.sum(low, axis=0) * scale
            acc += tl.sum(b.to(tl.float32) * low[:, None], axis=0)
        else:
            in_low = in_r[:, None] & (tokens >= 0)[None, :]
            low = _load_low(low_ptrs + lanes[:, None], in_low, stride_split, SPLITS)
            acc = _add_product(acc, b, low * scale)
    out = (out.to(tl.float32) + acc).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=mask)


def expand(
    out: torch.Tensor,
    low: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    b: torch.Tensor,
    bounds: tuple[int, ...],
    rank_rows: torch.Tensor,
    ranks: torch.Tensor,
    scales: torch.Tensor,
    tiles: AdapterTiles,
    norm: tuple[torch.Tensor, int, float] | None = None,
) -> None:
    """out: [T, N], last stride 1, changed in place; low: of `shrink`; places: [C] and tokens: [C,
    tokens of a chunk] int32; b: [rank rows, N], last stride 1; bounds: of the S parts; rank_rows:
    [P, most ranks] and ranks: [P, S] int32, scales: [P, S] float32, last stride 1; norm: the
    squares of `shrink`, how many inputs they are of, and the norm's eps."""
    (num_chunks, chunk_tokens), most_ranks = tokens.shape, rank_rows.shape[1]
    counts = [triton.cdiv(end - first, tiles.outputs) for first, end in itertools.pairwise(bounds)]
    first_tiles = (0, *itertools.accumulate(counts))
    squares, normed, eps = norm or (None, None, 0.0)
    options = pdl_options(out.device)
    launch(_expand_kernel, (first_tiles[-1], num_chunks))(
        out,
        low,
        places,
        tokens,
        b,
        rank_rows,
        ranks,
        scales,
        squares,
        eps,
        out.shape[0],
        out.stride(0),
        low.stride(1),
        b.stride(0),
        rank_rows.stride(0),
        ranks.stride(0),
        scales.stride(0),
        BOUNDS=bounds,
        TILES=first_tiles,
        PARTS=len(counts),
        CHUNK=chunk_tokens,
        SPLITS=low.shape[0],
        BLOCK_SPLITS=triton.next_power_of_2(low.shape[0]),
        ROW=out.shape[0] == 1,
        NORMED=normed,
        BLOCK_N=tiles.outputs,
        BLOCK_R=min(max(triton.next_power_of_2(most_ranks), 16), tiles.ranks),
        BLOCK_T=max(triton.next_power_of_2(chunk_tokens), 16),
        PDL=bool(options),
        num_warps=tiles.expand_warps,
        **options,
    )
