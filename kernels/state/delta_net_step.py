"""One token of each row through a gated delta net, between its two projections, in one launch.

    q, k, v = silu(conv(projected)), q and k divided by their lengths     S = exp(g) S
    S += k (beta (v - Sᵀ k))ᵀ     y = norm(Sᵀ q / sqrt(K)) silu(gate)

One program walks over some values of the heads of one row that share a key, tile by tile, and loads
the next tile of the state while it computes one. Each of these programs convolves key and query
again; the last to finish stores their new inputs and norms these heads, from the L2 cache.

Memory: a row's state read and written once, 8 K V bytes per head in float32, is the bound.

Source: gated delta networks (arXiv 2412.06464). Twin:
`core.nn.state.operations.StateOperations.delta_net`.
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


@triton.jit
def _norm_heads(
    out_ptr,
    gate_ptr,
    norm_ptr,
    first,
    eps,
    EACH: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Norm EACH heads from `first` on, and gate them: a row's [heads, V], in place."""
    part, value = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    inside = (part < EACH)[:, None] & (value < V)[None, :]
    place = (first + part)[:, None] * V + value[None, :]
    # Not from this multiprocessor's own cache: others wrote most of them.
    y = tl.load(out_ptr + place, mask=inside, other=0.0, cache_modifier=".cg")
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + value, mask=value < V, other=0.0).to(tl.float32)
    wide = y.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=1) / V + eps)[:, None]
    # Rounded before the weight and before the gate, as models were trained.
    normed = (wide.to(y.dtype).to(tl.float32) * weight[None, :]).to(y.dtype).to(tl.float32)
    normed *= gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + place, normed.to(y.dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _delta_net_step_kernel(
    out_ptr,
    projected_ptr,
    conv_weight_ptr,
    inputs_ptr,
    rate_ptr,
    bias_ptr,
    norm_ptr,
    state_ptr,
    counter_ptr,
    seq_lens_ptr,
    slots_ptr,
    stride_projected,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUES: tl.constexpr,
    TILES: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: TILES tiles of VALUES values of the heads of one key of one row. inputs_ptr: the
    convolution's state; WIDE: see `StepConfig.wide`."""
    EACH: tl.constexpr = HEADS // GROUPS
    SIZE: tl.constexpr = 2 * GROUPS * K + HEADS * V
    PER_HEAD: tl.constexpr = (V + VALUES - 1) // VALUES
    PROGRAMS: tl.constexpr = (EACH * PER_HEAD + TILES - 1) // TILES
    row = tl.program_id(0)
    group = tl.program_id(1)
    first = tl.program_id(2) * TILES
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    continues = tl.load(seq_lens_ptr + row) != 1
    number = tl.arange(0, BLOCK_K)
    own, wide = tl.arange(0, VALUES), tl.arange(0, WIDE)
    in_k = number < K
    state_ptr += slot * (HEADS * K * V)
    head, place, in_tile = head_tile(first, own, group, EACH, V, VALUES)
    states = state_ptr + (head * K + number[:, None]) * V + place[None, :]
    inside = in_k[:, None] & in_tile[None, :]
    ahead = tl.load(states, mask=inside & continues, other=0.0)
    target = head * V + place
    head, place, in_v = head_tile(first + wide // VALUES, wide % VALUES, group, EACH, V, VALUES)
    value, in_v = 2 * GROUPS * K + head * V + place, in_v & (wide < TILES * VALUES)
    query = group * K + number
    key = GROUPS * K + query
    inputs_ptr += slot * (TAPS - 1) * SIZE
    q_sum, q_last, q_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_weight_ptr, query, in_k, continues, SIZE, TAPS, False
    )
    k_sum, k_last, k_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_weight_ptr, key, in_k, continues, SIZE, TAPS, False
    )
    v_sum, v_last, v_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_weight_ptr, value, in_v, continues, SIZE, TAPS, False
    )
    rates = head_numbers(rate_ptr, first, group, HEADS, EACH, PER_HEAD, TILES)
    biases = head_numbers(bias_ptr, first, group, HEADS, EACH, PER_HEAD, TILES)
    if PDL:
        gdc_wait()
    projected_ptr += row.to(tl.int64) * stride_projected
    new_q = tl.load(projected_ptr + query, mask=in_k, other=0.0)
    new_k = tl.load(projected_ptr + key, mask=in_k, other=0.0)
    new_v = tl.load(projected_ptr + value, mask=in_v, other=0.0)
    numbers_ptr = projected_ptr + SIZE + HEADS * V
    betas = head_numbers(numbers_ptr, first, group, HEADS, EACH, PER_HEAD, TILES)
    steps = head_numbers(numbers_ptr + HEADS, first, group, HEADS, EACH, PER_HEAD, TILES)
    q = convolved(q_sum, q_last, new_q)
    k = convolved(k_sum, k_last, new_k)
    v = convolved(v_sum, v_last, new_v)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    both = tl.sum(k * q, axis=0)
    out_ptr += row.to(tl.int64) * (HEADS * V)
    counter = counter_ptr + row * GROUPS + group
    last = True
    for tile in tl.static_range(TILES):
        at, exists, result, present = states, inside, target, in_tile
        state = ahead.to(tl.float32)
        if tile + 1 < TILES:
            head, place, in_tile = head_tile(first + tile + 1, own, group, EACH, V, VALUES)
            states = state_ptr + (head * K + number[:, None]) * V + place[None, :]
            inside = in_k[:, None] & in_tile[None, :]
            ahead = tl.load(states, mask=inside & continues, other=0.0)
            target = head * V + place
        state *= tl.exp(rates[tile] * softplus(steps[tile] + biases[tile]))
        # Both sums of the old state, so that none waits for the other: Sᵀ q after the step is what
        # it was before, and what is added times k·q.
        missing = tl.gather(v, tile * VALUES + own, 0) - tl.sum(state * k[:, None], axis=0)
        before = tl.sum(state * q[:, None], axis=0)
        added = missing / (1.0 + tl.exp(-betas[tile]))
        y = before + added * both
        state += k[:, None] * added[None, :]
        tl.store(out_ptr + result, y.to(out_ptr.dtype.element_ty), mask=present)
        if tile == TILES - 1:
            # What is behind the barrier comes after all of this program's reads of old inputs and
            # its results; before the last tile is stored, for which the counter need not wait.
            tl.debug_barrier()
            if PROGRAMS > 1:
                last = tl.atomic_add(counter, 1, sem="acq_rel") == PROGRAMS - 1
        tl.store(at, state.to(state_ptr.dtype.element_ty), mask=exists)
    store_inputs(inputs_ptr, v_kept, new_v, value, in_v, SIZE, TAPS)
    if last:
        if PROGRAMS > 1:
            tl.store(counter, 0)
        gates = projected_ptr + SIZE
        _norm_heads(out_ptr, gates, norm_ptr, group * EACH, eps, EACH, V, BLOCK_H, BLOCK_V)
        store_inputs(inputs_ptr, q_kept, new_q, query, in_k, SIZE, TAPS)
        store_inputs(inputs_ptr, k_kept, new_k, key, in_k, SIZE, TAPS)


def step_config(num_rows: int, heads: int, keys: int, values: int) -> StepConfig:
    """Return the tiles for `num_rows` states of [heads, keys, values], from a sweep on an H200 with
    a layer of Qwen3-Next.
    """
    widest = triton.next_power_of_2(values)
    if num_rows <= FEW_ROWS:
        return StepConfig(min(16, widest), 2)
    return StepConfig(min(32, widest), 4, 4)


def delta_net_step(
    projected: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    state: torch.Tensor,
    rows: Rows,
    counters: torch.Tensor,
    *,
    groups: int,
    config: StepConfig | None = None,
) -> torch.Tensor:
    """projected: [R, (2 G K + H V) + H V + 2 H], inputs of the convolution (queries, keys and
    values), gate, logits of beta and step sizes, last stride 1; weight: [2 G K + H V, taps],
    contiguous; inputs: [num_states, taps - 1, 2 G K + H V] and state: [num_states, H, K, V],
    contiguous, changed; rate, dt_bias: [H] float32; norm: [V]; counters: [at least R G] int32,
    zeros before and after; `rows` have one token each → [R, H V]"""
    num_rows = projected.shape[0]
    heads, keys, values = state.shape[1:]
    if rows.max_query_len > 1 or counters.numel() < num_rows * groups:
        raise ValueError(f"{num_rows} rows of one token each, and as many counters per group")
    config = config or step_config(num_rows, heads, keys, values)
    out = torch.empty((num_rows, heads * values), dtype=projected.dtype, device=projected.device)
    options = pdl_options(projected.device)
    programs = config.programs(heads // groups, values)
    launch(_delta_net_step_kernel, (num_rows, groups, programs))(
        out, projected, weight, inputs, rate, dt_bias, norm, state, counters,
        rows.seq_lens, rows.slots, projected.stride(0), keys**-0.5, eps,
        HEADS=heads, GROUPS=groups, K=keys, V=values, TAPS=weight.shape[1],
        BLOCK_H=triton.next_power_of_2(heads // groups), BLOCK_K=triton.next_power_of_2(keys),
        BLOCK_V=triton.next_power_of_2(values), VALUES=config.channels,
        TILES=config.tiles, WIDE=config.wide, PDL=bool(options), num_warps=config.num_warps,
        **options,
    )  # fmt: skip
    return out
