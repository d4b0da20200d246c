"""Mamba 2's recurrence over long rows: all chunks of tokens at once, except for states.

With total(i) the cumulative logarithm of the decay in the chunk, and S the state before the chunk:

    y[i] = exp(total(i)) S c[i] + Σ_{j≤i} exp(total(i) - total(j)) dt[j] (c[i]·b[j]) x[j] + d x[i]

Three launches. Step sizes and totals of all chunks, which also tells later programs where chunks
begin. States, by a walk over the chunks of a row, a part of a head's state per program: one product
per chunk, whose inputs are loaded some chunks ahead; the state before each chunk is kept in the
inputs' type. Outputs: a program computes c·b of its chunk once for several heads, whose inputs are
loaded while the head before is computed, as attention does with keys.

Rows of few tokens are not touched: `ssd_scan` walks over them.

Memory: x is read twice and y written once, 6 P bytes per token and head; a state of 2 P N bytes per
chunk and head is written and read. Some 2 P (2 N + CHUNK) operations per token and head: bound by
memory, given enough loads in flight. Source: Mamba 2 (arXiv 2405.21060), section 6. Twin: as that
of `ssd_scan`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from .rows import MOST_ROWS, PLACES, Rows, long_row, longer_row, row_of, softplus


class ChunkTiles(NamedTuple):
    chunk: int = 128
    """Tokens between two states that are kept; a power of 2, at least 16."""
    columns: int = 64
    """Of a state's columns, those of a program of the walk."""
    state_warps: int = 4
    state_stages: int = 3
    heads: int = 20
    """Heads of a program of outputs, at most."""
    output_warps: int = 8
    output_stages: int = 3
    programs: int = 132
    """Programs of outputs that run at a time."""


TILES = ChunkTiles()
STEP_HEADS = 8
"""Heads per program of the first launch."""
BEGIN = 2
"""Time of an output program before its first head, in heads."""
CHANNELS = 64
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PLACES)
def _ssd_steps_kernel(
    total_ptr,
    key_ptr,
    chunk_ptr,
    dt_ptr,
    a_ptr,
    bias_ptr,
    query_start_ptr,
    num_rows,
    stride_dt,
    low,
    high,
    HEADS: tl.constexpr,
    STEP_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    LONG: tl.constexpr,
):
    """One program: STEP_HEADS heads of one chunk; logarithms to the base 2: of the decay since the
    chunk's begin, and that less the one of the step size, whose difference weighs a token."""
    index = tl.program_id(0)
    row, part, _ = longer_row(index, query_start_ptr, num_rows, CHUNK, LONG)
    begin = tl.load(query_start_ptr + tl.maximum(row, 0)) + part * CHUNK
    end = tl.load(query_start_ptr + tl.maximum(row, 0) + 1)
    count = tl.where(row < 0, 0, tl.minimum(end - begin, CHUNK))
    if tl.program_id(1) == 0:
        tl.store(chunk_ptr + 2 * index, begin)
        tl.store(chunk_ptr + 2 * index + 1, count)
    if count == 0:
        return
    at = tl.arange(0, CHUNK)
    head = tl.program_id(1) * STEP_HEADS + tl.arange(0, STEP_HEADS)
    in_heads = head < HEADS
    a = tl.load(a_ptr + head, mask=in_heads, other=0.0)
    bias = tl.load(bias_ptr + head, mask=in_heads, other=0.0)
    inside = (at < count)[:, None] & in_heads[None, :]
    steps = dt_ptr + (begin.to(tl.int64) + at)[:, None] * stride_dt + head[None, :]
    step = tl.load(steps, mask=inside, other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step + bias[None, :]), low), high)
    # Tokens behind the row's end neither add nor decay.
    step = tl.where(inside, step, 0.0)
    total = tl.cumsum(step * (a * LOG2_E)[None, :], axis=0)
    place = (index.to(tl.int64) * HEADS + head)[None, :] * CHUNK + at[:, None]
    tl.store(total_ptr + place, total, mask=in_heads[None, :])
    tl.store(key_ptr + place, total - tl.log2(step), mask=in_heads[None, :])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PLACES)
def _ssd_state_kernel(
    before_ptr,
    total_ptr,
    key_ptr,
    x_ptr,
    b_ptr,
    state_ptr,
    query_start_ptr,
    seq_lens_ptr,
    slots_ptr,
    num_rows,
    stride_x,
    stride_b,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    LONG: tl.constexpr,
):
    """One program: BLOCK_P x COLUMNS numbers of one head's state, through some long rows."""
    head = tl.program_id(1)
    tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    channel = tl.program_id(2) // tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    place = tl.program_id(2) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, CHUNK)
    in_p, in_n = channel < P, place < N
    in_state = in_p[:, None] & in_n[None, :]
    numbers = channel[:, None] * N + place[None, :]
    channels = x_ptr + head * P + channel[None, :]
    places = b_ptr + head // (HEADS // GROUPS) * N + place[None, :]
    index = tl.program_id(0)
    row, first, num_long = long_row(index, query_start_ptr, num_rows, CHUNK, LONG)
    while index < num_long:
        start, count, slot, begins = row_of(row, query_start_ptr, seq_lens_ptr, slots_ptr)
        states = state_ptr + (slot * HEADS + head) * (P * N) + numbers
        state = tl.load(states, mask=in_state & (begins == 0), other=0.0).to(tl.float32)
        for number in range(0, (count + CHUNK - 1) // CHUNK):
            line = (number * CHUNK + at)[:, None]
            token, inside = start + line, line < count
            source = (first + number).to(tl.int64) * HEADS + head
            x = tl.load(channels + token * stride_x, mask=inside & in_p[None, :], other=0.0)
            b = tl.load(places + token * stride_b, mask=inside & in_n[None, :], other=0.0)
            key = tl.load(key_ptr + source * CHUNK + at)
            end = tl.load(total_ptr + source * CHUNK + CHUNK - 1)
            before = before_ptr + source * (P * N) + numbers
            tl.store(before, state.to(before_ptr.dtype.element_ty), mask=in_state)
            weighted = (tl.trans(x).to(tl.float32) * tl.exp2(end - key)[None, :]).to(x.dtype)
            state = tl.dot(weighted, b, state * tl.exp2(end), input_precision="ieee")
        tl.store(states, state.to(state_ptr.dtype.element_ty), mask=in_state)
        index += tl.num_programs(0)
        if index < num_long:
            row, first, _ = long_row(index, query_start_ptr, num_rows, CHUNK, LONG)


@triton.jit(do_not_specialize=["heads"])
def _ssd_output_kernel(
    out_ptr,
    before_ptr,
    total_ptr,
    key_ptr,
    chunk_ptr,
    x_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    heads,
    stride_x,
    stride_b,
    stride_c,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: BLOCK_P channels of the outputs of one chunk, of `heads` heads of a group."""
    index, head = tl.program_id(1), tl.program_id(0) * heads
    begin = tl.load(chunk_ptr + 2 * index).to(tl.int64)
    count = tl.load(chunk_ptr + 2 * index + 1)
    if count == 0:
        return
    at, place = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    channel = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_p, in_n = channel < P, place < N
    inside = (at < count)[:, None]
    group = head // (HEADS // GROUPS)
    token = (begin + at)[:, None]
    in_keys = inside & in_n[None, :]
    c = tl.load(c_ptr + token * stride_c + group * N + place[None, :], mask=in_keys, other=0.0)
    b = tl.load(b_ptr + token * stride_b + group * N + place[None, :], mask=in_keys, other=0.0)
    scores = tl.dot(c, tl.trans(b), input_precision="ieee")
    earlier = at[:, None] >= at[None, :]
    for number in range(0, heads):
        source = index.to(tl.int64) * HEADS + head + number
        channels = (head + number) * P + channel[None, :]
        in_x = inside & in_p[None, :]
        x = tl.load(x_ptr + token * stride_x + channels, mask=in_x, other=0.0)
        before = tl.load(
            before_ptr + source * (P * N) + channel[None, :] * N + place[:, None],
            mask=in_p[None, :] & in_n[:, None], other=0.0,
        )  # fmt: skip
        total = tl.load(total_ptr + source * CHUNK + at)
        key = tl.load(key_ptr + source * CHUNK + at)
        y = tl.dot(c, before, input_precision="ieee") * tl.exp2(total)[:, None]
        # Chosen before exp2, which may overflow for later tokens.
        left = tl.exp2(tl.where(earlier, total[:, None] - key[None, :], float("-inf")))
        y = tl.dot((scores * left).to(x.dtype), x, y, input_precision="ieee")
        y += x.to(tl.float32) * tl.load(d_ptr + head + number)
        target = out_ptr + token * (HEADS * P) + channels
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=in_x)


def ssd_chunks(
    out: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    state: torch.Tensor,
    rows: Rows,
    *,
    long: int,
    tiles: ChunkTiles = TILES,
) -> None:
    """Arguments as `ssd_scan`'s, half precision, N at most 256; out: [T, H, P], gets the outputs of
    rows of more than `long` tokens."""
    num_tokens, heads, width = x.shape
    groups, size = b.shape[1:]
    num_rows, chunk = rows.slots.shape[0], tiles.chunk
    # Each long row has more than `long` tokens, and its last chunk may have one.
    most_rows = min(num_rows, num_tokens // (long + 1))
    if not most_rows:
        return
    most_chunks = num_tokens // chunk + most_rows
    totals, keys = torch.empty((2, most_chunks, heads, chunk), device=x.device)
    chunks = torch.empty((most_chunks, 2), dtype=torch.int32, device=x.device)
    before = torch.empty((most_chunks, heads, width, size), dtype=x.dtype, device=x.device)
    launch(_ssd_steps_kernel, (most_chunks, triton.cdiv(heads, STEP_HEADS)))(
        totals, keys, chunks, dt, a, dt_bias, rows.query_start, num_rows, dt.stride(0), *dt_limit,
        HEADS=heads, STEP_HEADS=STEP_HEADS, CHUNK=chunk, LONG=long, num_warps=4,
    )  # fmt: skip
    sizes = {"HEADS": heads, "GROUPS": groups, "P": width, "N": size, "CHUNK": chunk}
    block_p = min(CHANNELS, max(16, triton.next_power_of_2(width)))
    block_n = max(16, triton.next_power_of_2(size))
    columns = min(tiles.columns, block_n)
    parts = triton.cdiv(width, block_p)
    grid = (min(most_rows, MOST_ROWS), heads, parts * triton.cdiv(size, columns))
    launch(_ssd_state_kernel, grid)(
        before, totals, keys, x, b, state, rows.query_start, rows.seq_lens, rows.slots, num_rows,
        x.stride(0), b.stride(0), **sizes, BLOCK_P=block_p, COLUMNS=columns, LONG=long,
        num_warps=tiles.state_warps, num_stages=tiles.state_stages,
    )  # fmt: skip
    each = min(
        (each for each in range(1, tiles.heads + 1) if heads // groups % each == 0),
        key=lambda each: (
            (each + BEGIN) * triton.cdiv(most_chunks * parts * (heads // each), tiles.programs)
        ),
    )
    launch(_ssd_output_kernel, (heads // each, most_chunks, parts))(
        out, before, totals, keys, chunks, x, b, c, d, each, x.stride(0), b.stride(0), c.stride(0),
        **sizes, BLOCK_P=block_p, BLOCK_N=block_n,
        num_warps=tiles.output_warps, num_stages=tiles.output_stages,
    )  # fmt: skip
