"""Mamba 2's recurrence over long rows: all chunks of tokens at once, except for states.

Three launches: what each chunk adds to a state that is zero before it; the state before each chunk,
by a walk over the chunks of a row, number by number; and outputs, from the state before the chunk
and from the chunk's own tokens, in blocks of tokens that see each other through products of tiles.

Rows of at most CHUNK tokens are not touched: `ssd_scan` walks over them. So a row has fewer than
2 n / CHUNK chunks, and the states between them fit in some hundred megabytes for 8,192 tokens.

Memory: x, b and c are read twice (b and c by each head), states of 4 P N bytes per chunk and head
written and read twice. Some 2 (2 P N + M N + CHUNK P) operations per token and head for blocks of M
tokens. Source: Mamba 2 (arXiv 2405.21060), section 6. Twin: as that of `ssd_scan`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from .rows import PLACES, Rows, longer_row, softplus

CHUNK = 256
"""Tokens between two states that are kept."""
BLOCK = 64
"""Tokens that see each other at a time."""
PASSED = 1024
"""Numbers of a state that a program walks with."""


@triton.jit
def _steps(dt_ptr, token, end, stride_dt, a, bias, low, high):
    """Return (step sizes, logarithms of the decay since the block's begin, and of the whole
    block's). Tokens behind the row's end neither add nor decay."""
    inside = token < end
    step = tl.load(dt_ptr + token * stride_dt, mask=inside, other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step + bias), low), high)
    step = tl.where(inside, step, 0.0)
    return step, tl.cumsum(step * a, axis=0), tl.sum(step * a, axis=0)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PLACES)
def _ssd_added_kernel(
    added_ptr,
    decay_ptr,
    x_ptr,
    dt_ptr,
    b_ptr,
    a_ptr,
    bias_ptr,
    query_start_ptr,
    num_rows,
    stride_x,
    stride_dt,
    stride_b,
    low,
    high,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: what one chunk adds to one head's state, and the logarithm of its decay."""
    index, head = tl.program_id(0), tl.program_id(1)
    row, part, _ = longer_row(index, query_start_ptr, num_rows, CHUNK, CHUNK)
    if row < 0:
        return
    begin = (tl.load(query_start_ptr + row) + part * CHUNK).to(tl.int64)
    end = tl.load(query_start_ptr + row + 1)
    channel, place, at = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
    in_p, in_n = channel < P, place < N
    a, bias = tl.load(a_ptr + head), tl.load(bias_ptr + head)
    x_ptr += head * P
    b_ptr += head // (HEADS // GROUPS) * N
    added = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    after = 0.0
    for number in range(CHUNK // BLOCK):
        token = begin + CHUNK - (number + 1) * BLOCK + at
        inside = (token < end)[:, None]
        step, total, whole = _steps(dt_ptr + head, token, end, stride_dt, a, bias, low, high)
        x = tl.load(
            x_ptr + token[:, None] * stride_x + channel[None, :], mask=inside & in_p[None, :],
            other=0.0,
        )  # fmt: skip
        b = tl.load(
            b_ptr + token[:, None] * stride_b + place[None, :], mask=inside & in_n[None, :],
            other=0.0,
        )  # fmt: skip
        weight = step * tl.exp(whole - total + after)
        weighted = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        added = tl.dot(tl.trans(weighted), b, added, input_precision="ieee")
        after += whole
    target = added_ptr + (index.to(tl.int64) * HEADS + head) * (P * N)
    tl.store(
        target + channel[:, None] * N + place[None, :], added, mask=in_p[:, None] & in_n[None, :]
    )
    tl.store(decay_ptr + index * HEADS + head, after)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PLACES)
def _ssd_pass_kernel(
    added_ptr,
    decay_ptr,
    state_ptr,
    query_start_ptr,
    seq_lens_ptr,
    slots_ptr,
    num_rows,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PASSED: tl.constexpr,
):
    """One program: PASSED numbers of one head's state, through all chunks of a row, if the program
    is that of the first one. The state before each chunk takes the place of what the chunk
    adds."""
    head = tl.program_id(1)
    first = tl.program_id(0)
    row, part, _ = longer_row(first, query_start_ptr, num_rows, CHUNK, CHUNK)
    if (row < 0) | (part > 0):
        return
    count = tl.load(query_start_ptr + row + 1) - tl.load(query_start_ptr + row)
    begins = tl.load(seq_lens_ptr + row) == count
    slot = tl.load(slots_ptr + row).to(tl.int64)
    place = tl.program_id(2) * PASSED + tl.arange(0, PASSED)
    inside = place < SIZE
    states = state_ptr + (slot * HEADS + head) * SIZE + place
    state = tl.load(states, mask=inside & (begins == 0), other=0.0).to(tl.float32)
    target = added_ptr + (first.to(tl.int64) * HEADS + head) * SIZE + place
    decay_ptr += first * HEADS + head
    for _ in range(0, count, CHUNK):
        added = tl.load(target, mask=inside, other=0.0)
        tl.store(target, state, mask=inside)
        state = state * tl.exp(tl.load(decay_ptr)) + added
        target += HEADS * SIZE
        decay_ptr += HEADS
    tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PLACES)
def _ssd_output_kernel(
    out_ptr,
    before_ptr,
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_ptr,
    d_ptr,
    bias_ptr,
    query_start_ptr,
    num_rows,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    low,
    high,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the outputs of one block of a chunk for one head."""
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    index, head = tl.program_id(0) // BLOCKS, tl.program_id(1)
    own = BLOCKS - 1 - tl.program_id(0) % BLOCKS
    row, part, _ = longer_row(index, query_start_ptr, num_rows, CHUNK, CHUNK)
    if row < 0:
        return
    begin = (tl.load(query_start_ptr + row) + part * CHUNK).to(tl.int64)
    end = tl.load(query_start_ptr + row + 1)
    if begin + own * BLOCK >= end:
        return
    channel, place, at = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
    in_p, in_n = channel < P, place < N
    a, bias = tl.load(a_ptr + head), tl.load(bias_ptr + head)
    group = head // (HEADS // GROUPS)
    x_ptr += head * P
    b_ptr += group * N
    dt_ptr += head
    token = begin + own * BLOCK + at
    inside = (token < end)[:, None]
    in_x, in_b = inside & in_p[None, :], inside & in_n[None, :]
    step, total, _ = _steps(dt_ptr, token, end, stride_dt, a, bias, low, high)
    x = tl.load(x_ptr + token[:, None] * stride_x + channel[None, :], mask=in_x, other=0.0)
    b = tl.load(b_ptr + token[:, None] * stride_b + place[None, :], mask=in_b, other=0.0)
    c = tl.load(
        c_ptr + group * N + token[:, None] * stride_c + place[None, :], mask=in_b, other=0.0
    )
    # Chosen before exp, which may overflow for later tokens.
    earlier = at[:, None] >= at[None, :]
    left = tl.exp(tl.where(earlier, total[:, None] - total[None, :], float("-inf")))
    seen = tl.dot(c, tl.trans(b), input_precision="ieee") * left * step[None, :]
    y = x.to(tl.float32) * tl.load(d_ptr + head)
    y = tl.dot(seen.to(x.dtype), x, y, input_precision="ieee")
    for number in range(own):
        earlier_token = begin + (own - 1 - number) * BLOCK + at
        step, since, whole = _steps(dt_ptr, earlier_token, end, stride_dt, a, bias, low, high)
        x = tl.load(
            x_ptr + earlier_token[:, None] * stride_x + channel[None, :], mask=in_p[None, :],
            other=0.0,
        )  # fmt: skip
        b = tl.load(
            b_ptr + earlier_token[:, None] * stride_b + place[None, :], mask=in_n[None, :],
            other=0.0,
        )  # fmt: skip
        left = tl.exp(total[:, None] + (whole - since)[None, :])
        seen = tl.dot(c, tl.trans(b), input_precision="ieee") * left * step[None, :]
        y = tl.dot(seen.to(x.dtype), x, y, input_precision="ieee")
        total += whole
    source = before_ptr + (index.to(tl.int64) * HEADS + head) * (P * N)
    before = tl.load(
        source + channel[:, None] * N + place[None, :], mask=in_p[:, None] & in_n[None, :],
        other=0.0,
    ).to(c.dtype)  # fmt: skip
    y += tl.dot(c, tl.trans(before), input_precision="ieee") * tl.exp(total)[:, None]
    target = out_ptr + (token[:, None] * HEADS + head) * P + channel[None, :]
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
    chunk: int = CHUNK,
    block: int = BLOCK,
) -> None:
    """Arguments as `ssd_scan`'s, half precision; out: [T, H, P], gets the outputs of rows of more
    than `chunk` tokens. chunk: a multiple of block, a power of 2, at least 16."""
    num_tokens, heads, width = x.shape
    groups, size = b.shape[1:]
    num_rows = rows.slots.shape[0]
    # Each long row has more than `chunk` tokens.
    most_rows = min(num_rows, num_tokens // (chunk + 1))
    if not most_rows:
        return
    most_chunks = num_tokens // chunk + most_rows
    added = torch.empty((most_chunks, heads, width, size), device=x.device)
    decay = torch.empty((most_chunks, heads), device=x.device)
    options = {
        "HEADS": heads, "GROUPS": groups, "P": width, "N": size,
        "BLOCK_P": max(16, triton.next_power_of_2(width)),
        "BLOCK_N": max(16, triton.next_power_of_2(size)), "CHUNK": chunk, "BLOCK": block,
        "num_warps": 8 if size > 128 else 4, "num_stages": 1,
    }  # fmt: skip
    launch(_ssd_added_kernel, (most_chunks, heads))(
        added, decay, x, dt, b, a, dt_bias, rows.query_start, num_rows,
        x.stride(0), dt.stride(0), b.stride(0), *dt_limit, **options,
    )  # fmt: skip
    grid = (most_chunks, heads, triton.cdiv(width * size, PASSED))
    launch(_ssd_pass_kernel, grid)(
        added, decay, state, rows.query_start, rows.seq_lens, rows.slots, num_rows,
        HEADS=heads, SIZE=width * size, CHUNK=chunk, PASSED=PASSED, num_warps=4,
    )  # fmt: skip
    launch(_ssd_output_kernel, (most_chunks * (chunk // block), heads))(
        out, added, x, dt, b, c, a, d, dt_bias, rows.query_start, num_rows,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), *dt_limit, **options,
    )  # fmt: skip
