"""One token of each row through Mamba 2, between its two projections, in one launch.

    x, B, C = silu(conv(projected))     S = exp(dt a) S + dt x Bᵀ     y = (S C + d x) silu(gate)

and with a norm y = norm(S C + d x, gate) over each group of channels.

One program walks over some channels of one group of heads of one row, tile by tile, and loads the
next tile of the state while it computes one. The programs of a group each convolve that group's
keys and queries (B and C) again; the last to finish stores their new inputs and norms the group.

Memory: a row's state read and written once, 8 P N bytes per head in float32, is the bound. With one
row that takes as long as a launch, so a program loads what the previous kernel does not write
before it waits for that kernel (`pdl`).

Source: Mamba 2 (arXiv 2405.21060). Twin: `core.nn.state.operations.StateOperations.mamba2`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .conv_step import convolved, kept_inputs, store_inputs
from .head_tiles import FEW_ROWS, StepConfig, head_numbers, head_tile
from .rows import PLACES, Rows, softplus

NORM_BLOCK = 1024
"""Channels of a group that are normed at a time."""


@triton.jit
def _gated(
    out_ptr,
    gate_ptr,
    place,
    gate_factor,
    SHARE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return channels of a group's result, float32, with GATE_FIRST times silu(gate), and that."""
    mask = place < SHARE
    # Not from this multiprocessor's own cache: others wrote most of them.
    y = tl.load(out_ptr + place, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    gate = tl.load(gate_ptr + place, mask=mask, other=0.0)
    if SCALED:
        # Rounded as in longer rows.
        gate = (gate.to(tl.float32) * gate_factor).to(gate.dtype)
    gate = gate.to(tl.float32)
    factor = gate / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        y *= factor
    return y, factor


@triton.jit
def _norm_group(
    out_ptr,
    gate_ptr,
    norm_ptr,
    gate_factor,
    eps,
    SHARE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm a group of SHARE channels in place, with its gate before or after the norm."""
    stored = out_ptr.dtype.element_ty
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in tl.static_range(0, SHARE, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        y, factor = _gated(out_ptr, gate_ptr, place, gate_factor, SHARE, GATE_FIRST, SCALED)
        squares += y * y
    scale = tl.rsqrt(tl.sum(squares, axis=0) / SHARE + eps)
    for begin in tl.static_range(0, SHARE, BLOCK):
        if SHARE > BLOCK:
            place = begin + tl.arange(0, BLOCK)
            y, factor = _gated(out_ptr, gate_ptr, place, gate_factor, SHARE, GATE_FIRST, SCALED)
        weight = tl.load(norm_ptr + place, mask=place < SHARE, other=0.0).to(tl.float32)
        # Rounded before the weight, and before a gate behind it, as models were trained.
        normed = (y * scale).to(stored).to(tl.float32) * weight
        if not GATE_FIRST:
            normed = normed.to(stored).to(tl.float32) * factor
        tl.store(out_ptr + place, normed.to(stored), mask=place < SHARE)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _mamba2_step_kernel(
    out_ptr,
    projected_ptr,
    conv_weight_ptr,
    conv_bias_ptr,
    inputs_ptr,
    a_ptr,
    d_ptr,
    bias_ptr,
    norm_ptr,
    state_ptr,
    counter_ptr,
    seq_lens_ptr,
    slots_ptr,
    stride_projected,
    low,
    high,
    gate_factor,
    step_factor,
    out_factor,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    TAPS: tl.constexpr,
    CONV_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: TILES tiles of BLOCK_P channels of one group of one row. inputs_ptr: the
    convolution's state.

    WIDE: see `StepConfig.wide`.
    """
    INNER: tl.constexpr = HEADS * P
    SIZE: tl.constexpr = INNER + 2 * GROUPS * N
    EACH: tl.constexpr = HEADS // GROUPS
    PER_HEAD: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    PROGRAMS: tl.constexpr = (EACH * PER_HEAD + TILES - 1) // TILES
    row = tl.program_id(0)
    group = tl.program_id(1)
    first = tl.program_id(2) * TILES
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    continues = tl.load(seq_lens_ptr + row) != 1
    own, wide = tl.arange(0, BLOCK_P), tl.arange(0, WIDE)
    number = tl.arange(0, BLOCK_N)
    in_n = number < N
    state_ptr += slot * (INNER * N)
    head, place, in_tile = head_tile(first, own, group, EACH, P, BLOCK_P)
    channel = head * P + place
    states = state_ptr + channel[:, None] * N + number[None, :]
    inside = in_tile[:, None] & in_n[None, :]
    ahead = tl.load(states, mask=inside & continues, other=0.0)
    head, place, in_x = head_tile(first + wide // BLOCK_P, wide % BLOCK_P, group, EACH, P, BLOCK_P)
    all_x, in_x = head * P + place, in_x & (wide < TILES * BLOCK_P)
    key = INNER + group * N + number
    query = key + GROUPS * N
    inputs_ptr += slot * (TAPS - 1) * SIZE
    x_sum, x_last, x_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_bias_ptr, all_x, in_x, continues, SIZE, TAPS, CONV_BIAS
    )
    key_sum, key_last, key_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_bias_ptr, key, in_n, continues, SIZE, TAPS, CONV_BIAS
    )
    query_sum, query_last, query_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_bias_ptr, query, in_n, continues, SIZE, TAPS, CONV_BIAS
    )
    rates = head_numbers(a_ptr, first, group, HEADS, EACH, PER_HEAD, TILES)
    skips = head_numbers(d_ptr, first, group, HEADS, EACH, PER_HEAD, TILES)
    biases = head_numbers(bias_ptr, first, group, HEADS, EACH, PER_HEAD, TILES)
    if PDL:
        gdc_wait()
    projected_ptr += row.to(tl.int64) * stride_projected
    new_x = tl.load(projected_ptr + INNER + all_x, mask=in_x, other=0.0)
    new_key = tl.load(projected_ptr + INNER + key, mask=in_n, other=0.0)
    new_query = tl.load(projected_ptr + INNER + query, mask=in_n, other=0.0)
    steps_ptr = projected_ptr + INNER + SIZE
    steps = head_numbers(steps_ptr, first, group, HEADS, EACH, PER_HEAD, TILES)
    if not NORM:
        gate = tl.load(projected_ptr + all_x, mask=in_x, other=0.0).to(tl.float32)
        if SCALED:
            gate *= gate_factor
        factor = gate / (1.0 + tl.exp(-gate))
        if SCALED:
            factor *= out_factor
    x = convolved(x_sum, x_last, new_x)
    keys = convolved(key_sum, key_last, new_key)
    queries = convolved(query_sum, query_last, new_query)
    out_ptr += row.to(tl.int64) * INNER
    counter = counter_ptr + row * GROUPS + group
    last = True
    for tile in tl.static_range(TILES):
        target, exists, at, present = states, inside, channel, in_tile
        state = ahead.to(tl.float32)
        if tile + 1 < TILES:
            head, place, in_tile = head_tile(first + tile + 1, own, group, EACH, P, BLOCK_P)
            channel = head * P + place
            states = state_ptr + channel[:, None] * N + number[None, :]
            inside = in_tile[:, None] & in_n[None, :]
            ahead = tl.load(states, mask=inside & continues, other=0.0)
        if not NORM and tile == 0 and PROGRAMS > 1:
            # What is behind the barrier comes after all of this program's reads of old inputs;
            # before anything is stored, for which the counter would wait.
            tl.debug_barrier()
            last = tl.atomic_add(counter, 1, sem="release") == PROGRAMS - 1
        taken = tile * BLOCK_P + own
        step = steps[tile]
        if SCALED:
            # Rounded as in longer rows.
            step = (step * step_factor).to(projected_ptr.dtype.element_ty).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(step + biases[tile]), low), high)
        values = tl.gather(x, taken, 0)
        state = state * tl.exp(step * rates[tile]) + (values * step)[:, None] * keys[None, :]
        y = tl.sum(state * queries[None, :], axis=1) + skips[tile] * values
        if not NORM:
            y *= tl.gather(factor, taken, 0)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=present)
        if NORM and tile == TILES - 1:
            # After its results, too; before the last tile of the state is stored.
            tl.debug_barrier()
            if PROGRAMS > 1:
                last = tl.atomic_add(counter, 1, sem="acq_rel") == PROGRAMS - 1
        tl.store(target, state.to(state_ptr.dtype.element_ty), mask=exists)
    store_inputs(inputs_ptr, x_kept, new_x, all_x, in_x, SIZE, TAPS)
    if last:
        if PROGRAMS > 1:
            tl.store(counter, 0)
        if NORM:
            begin = group * (EACH * P)
            _norm_group(
                out_ptr + begin, projected_ptr + begin, norm_ptr + begin, gate_factor, eps,
                EACH * P, GATE_FIRST, SCALED, BLOCK_G,
            )  # fmt: skip
        store_inputs(inputs_ptr, key_kept, new_key, key, in_n, SIZE, TAPS)
        store_inputs(inputs_ptr, query_kept, new_query, query, in_n, SIZE, TAPS)


def step_config(num_rows: int, heads: int, width: int, states: int) -> StepConfig:
    """Return the tiles for `num_rows` states of [heads, width, states], from sweeps on an H200 with
    Mamba 2 2.7B, Falcon-H1 1.5B and Nemotron-H 8B.
    """
    most = max(1, 4096 // triton.next_power_of_2(states))
    widest = triton.next_power_of_2(width)
    if num_rows <= FEW_ROWS:
        return StepConfig(min(widest, 8 if num_rows == 1 else most), 4)
    return StepConfig(min(widest, max(1, most // 4)), 4, 8)


def mamba2_step(
    projected: torch.Tensor,
    weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    inputs: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    state: torch.Tensor,
    rows: Rows,
    counters: torch.Tensor,
    *,
    groups: int,
    norm: tuple[torch.Tensor, float, bool] | None = None,
    factors: tuple[float, float, float] | None = None,
    config: StepConfig | None = None,
) -> torch.Tensor:
    """projected: [R, H P + (H P + 2 G N) + H], gate, inputs of the convolution (x, B and C) and
    step sizes, last stride 1; weight: [H P + 2 G N, K], conv_bias: [H P + 2 G N], contiguous;
    inputs: [num_states, K - 1, H P + 2 G N] and state: [num_states, H, P, N], contiguous, changed;
    a, d, dt_bias: [H] float32; counters: [at least R G] int32, zeros before and after; `rows` have
    one token each; norm: of each group, its weight [H P], eps, and whether the gate comes first;
    None: the gate alone; factors: of gate, step sizes, and of the gated result, for which a norm
    has its weight → [R, H P]"""
    num_rows = projected.shape[0]
    heads, width, states = state.shape[1:]
    if rows.max_query_len > 1 or counters.numel() < num_rows * groups:
        raise ValueError(f"{num_rows} rows of one token each, and as many counters per group")
    config = config or step_config(num_rows, heads, width, states)
    programs = config.programs(heads // groups, width)
    norm_weight, eps, gate_first = norm or (None, 0.0, False)
    out = torch.empty((num_rows, heads * width), dtype=projected.dtype, device=projected.device)
    options = pdl_options(projected.device)
    launch(_mamba2_step_kernel, (num_rows, groups, programs))(
        out, projected, weight, conv_bias, inputs, a, d, dt_bias, norm_weight, state, counters,
        rows.seq_lens, rows.slots, projected.stride(0), *dt_limit, *(factors or (1.0, 1.0, 1.0)),
        eps,
        HEADS=heads, GROUPS=groups, P=width, N=states, TAPS=weight.shape[1],
        CONV_BIAS=conv_bias is not None, NORM=norm is not None, GATE_FIRST=gate_first,
        SCALED=factors is not None,
        BLOCK_P=config.channels, TILES=config.tiles, BLOCK_N=triton.next_power_of_2(states),
        BLOCK_G=min(triton.next_power_of_2(heads // groups * width), NORM_BLOCK),
        WIDE=config.wide, PDL=bool(options), num_warps=config.num_warps,
        **options,
    )  # fmt: skip
    return out
