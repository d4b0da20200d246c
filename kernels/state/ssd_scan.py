"""Mamba 2's recurrence over rows of any lengths; long ones are computed by `ssd_chunks`.

    S = exp(dt a) S + dt x bᵀ        y = S c + d x        dt = clamp(softplus(dt + bias))

One program holds the state of one row and head (for some of its channels) in registers, and walks
over the row in chunks: within a chunk, tokens see each other through products of tiles; what was
before them, through the state. A row of one token needs no products of tiles.

Memory: a state is read and written once per row, 8 P N bytes per head; of a row of one token that
is nearly all, and the bound. Of a prompt, x, b, c and y are read and written once (b and c by each
head); about 2 L (2 N + P + L) P ... operations per chunk of L tokens: bound by computing. Source:
Mamba 2 (arXiv 2405.21060), section 6. Twin: `core.nn.state.operations.StateOperations.ssd_scan`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .rows import PLACES, Rows, ScanWeights, row_of, softplus
from .ssd_chunks import TILES, ChunkTiles, ssd_chunks

ANY_LENGTH = 1 << 30
LONG = 64
"""Tokens of a row that a walk computes as fast."""
MOST_COLUMNS = 256


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _ssd_scan_kernel(
    out_ptr,
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_ptr,
    d_ptr,
    bias_ptr,
    state_ptr,
    query_start_ptr,
    seq_lens_ptr,
    slots_ptr,
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
    LONG: tl.constexpr,
    SINGLE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_P channels of one head of one row of at most LONG tokens."""
    head = tl.program_id(1)
    start, count, slot, begins = row_of(tl.program_id(0), query_start_ptr, seq_lens_ptr, slots_ptr)
    if (count == 0) | (count > LONG):
        return
    group = head // (HEADS // GROUPS)
    channel = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    place = tl.arange(0, BLOCK_N)
    in_p, in_n = channel < P, place < N
    in_state = in_p[:, None] & in_n[None, :]
    states = state_ptr + ((slot * HEADS + head) * P + channel[:, None]) * N + place[None, :]
    state = tl.load(states, mask=in_state & (begins == 0), other=0.0).to(tl.float32)
    a = tl.load(a_ptr + head)
    d = tl.load(d_ptr + head)
    bias = tl.load(bias_ptr + head)
    if PDL:
        # In a step of rows of one token nothing else writes their states.
        gdc_launch_dependents()
        gdc_wait()
    x_ptr += start * stride_x + head * P
    dt_ptr += start * stride_dt + head
    b_ptr += start * stride_b + group * N
    c_ptr += start * stride_c + group * N
    out_ptr += (start * HEADS + head) * P
    if count == 1:
        x = tl.load(x_ptr + channel, mask=in_p, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + place, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + place, mask=in_n, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt_ptr).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, low), high)
        state = state * tl.exp(step * a) + (x * step)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + d * x
        tl.store(out_ptr + channel, y.to(out_ptr.dtype.element_ty), mask=in_p)
    elif not SINGLE:
        at = tl.arange(0, CHUNK)
        earlier = at[:, None] >= at[None, :]
        for first in range(0, count, CHUNK):
            token = first + at
            inside = token < count
            in_x = inside[:, None] & in_p[None, :]
            in_b = inside[:, None] & in_n[None, :]
            x = tl.load(x_ptr + token[:, None] * stride_x + channel[None, :], mask=in_x, other=0.0)
            b = tl.load(b_ptr + token[:, None] * stride_b + place[None, :], mask=in_b, other=0.0)
            c = tl.load(c_ptr + token[:, None] * stride_c + place[None, :], mask=in_b, other=0.0)
            x, b, c = x.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
            step = tl.load(dt_ptr + token * stride_dt, mask=inside, other=0.0).to(tl.float32)
            step = tl.minimum(tl.maximum(softplus(step + bias), low), high)
            # Tokens behind the row's end neither add nor decay.
            step = tl.where(inside, step, 0.0)
            total = tl.cumsum(step * a, axis=0)
            end = tl.sum(step * a, axis=0)
            # Chosen before exp, which may overflow for later tokens.
            decay = tl.exp(tl.where(earlier, total[:, None] - total[None, :], float("-inf")))
            seen = tl.dot(c, tl.trans(b), input_precision=PRECISION) * decay * step[None, :]
            y = tl.dot(seen, x, input_precision=PRECISION)
            y += tl.dot(c, tl.trans(state), input_precision=PRECISION) * tl.exp(total)[:, None]
            y += d * x
            tl.store(
                out_ptr + token[:, None] * (HEADS * P) + channel[None, :],
                y.to(out_ptr.dtype.element_ty), mask=in_x,
            )  # fmt: skip
            added = x * (step * tl.exp(end - total))[:, None]
            state = state * tl.exp(end)
            state += tl.dot(tl.trans(added), b, input_precision=PRECISION)
    tl.store(states, state.to(state_ptr.dtype.element_ty), mask=in_state)


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: ScanWeights,
    state: torch.Tensor,
    rows: Rows,
    *,
    long: int | None = None,
    tiles: ChunkTiles = TILES,
) -> torch.Tensor:
    """x: [T, H, P]; dt: [T, H]; b, c: [T, G, N]: contiguous but for the first dimension;
    weights: a, d, dt_bias, [H] float32, and dt_limit; state: [num_states, H, P, N], contiguous,
    changed → [T, H, P]

    long: in half precision, rows of more tokens are computed by `ssd_chunks`; None: where that is
    faster; tiles: of `ssd_chunks`
    """
    num_tokens, heads, width = x.shape
    groups, size = b.shape[1:]
    (a, d, dt_bias, dt_limit), single = weights, rows.max_query_len == 1
    out = torch.empty((num_tokens, heads, width), dtype=x.dtype, device=x.device)
    block_n = max(16, triton.next_power_of_2(size))
    if long is None:
        long = LONG if size <= MOST_COLUMNS else ANY_LENGTH
    chunk, precision = 32, "tf32"
    block_p = max(16, min(triton.next_power_of_2(width), 4096 // block_n, 64))
    if x.dtype == torch.float32:
        # Products without tensor cores: small tiles stay in registers.
        chunk, block_p, precision, long = 16, 16, "ieee", ANY_LENGTH
    grid = (rows.slots.shape[0], heads, triton.cdiv(width, block_p))
    options = pdl_options(x.device) if single else {}
    launch(_ssd_scan_kernel, grid)(
        out, x, dt, b, c, a, d, dt_bias, state, rows.query_start, rows.seq_lens, rows.slots,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), *dt_limit,
        HEADS=heads, GROUPS=groups, P=width, N=size, BLOCK_P=block_p, BLOCK_N=block_n,
        CHUNK=chunk, LONG=long, SINGLE=single, PRECISION=precision,
        PDL=bool(options), **options,
        num_warps=4 if block_n <= 128 else 8, num_stages=1,
    )  # fmt: skip
    if not single and long < ANY_LENGTH:
        ssd_chunks(out, x, dt, b, c, *weights, state, rows, long=long, tiles=tiles)
    return out
