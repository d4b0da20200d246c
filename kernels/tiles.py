"""Functions that kernels of matrix products share: loading a tile, and the epilogue.

Sums are float32, of BLOCK_N outputs of one row ([BLOCK_N]) or of BLOCK_M rows ([BLOCK_N, BLOCK_M]:
the weight's rows take the tensor core's long side). A gated product has two sums: `acc` for outputs
n, the gate, and `up_acc` for outputs N + n.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import activated, gated_product

ASKED_BYTES = 1024
"""Bytes per prefetch instruction."""


@triton.jit
def load_tile(
    ptrs,
    in_rows,
    in_columns,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Load a tile, zeros outside of the matrix. in_rows, in_columns: masks of its two dims, each
    used only if that dim is not EVEN (a multiple of the tile); EVICT: an eviction policy or ""."""
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(ptrs, eviction_policy=EVICT)
    elif EVEN_COLUMNS:
        return tl.load(ptrs, mask=in_rows[:, None], other=0.0, eviction_policy=EVICT)
    else:
        mask = in_rows[:, None] & in_columns[None, :]
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def prefetch_l2(ptrs, BYTES: tl.constexpr):
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], " + BYTES + "; mov.u32 $0, 0;",
        "=r,l",
        [ptrs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_l2_some(ptrs, mask, BYTES: tl.constexpr):
    """As `prefetch_l2`, of the ptrs in the mask."""
    tl.inline_asm_elementwise(
        "{ .reg .pred %chosen; setp.ne.u32 %chosen, $2, 0;"
        " @%chosen cp.async.bulk.prefetch.L2.global [$1], " + BYTES + "; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptrs, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_weight_l2(weight_ptr, num_bytes, number, count):
    """Start copying the first bytes of a weight to the L2 cache, as program `number` of `count`."""
    weight_ptr = weight_ptr.to(tl.pointer_type(tl.int8))
    lanes = tl.arange(0, 128) * 1024
    for start in range(number * (128 * 1024), num_bytes, count * (128 * 1024)):
        prefetch_l2(weight_ptr + tl.minimum(start + lanes, num_bytes - 1024), "1024")


@triton.jit
def _once(ptrs, mask, INSTRUCTION: tl.constexpr):
    """Run an instruction on those of 32 pointers ($1) in the mask, in the first warp only."""
    tl.inline_asm_elementwise(
        "{ .reg .pred %chosen; .reg .u32 %thread; mov.u32 %thread, %tid.x;"
        " setp.ne.u32 %chosen, $2, 0; setp.lt.and.u32 %chosen, %thread, 32, %chosen;"
        " @%chosen " + INSTRUCTION + "; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptrs, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_l2_rows(ptrs, mask, BYTES: tl.constexpr):
    """Start copying BYTES (a string) from each of 32 ptrs in the mask to the L2 cache."""
    COPY: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], " + BYTES
    _once(ptrs, mask, COPY)


@triton.jit
def prefetch_l2_vector(ptr, SIZE: tl.constexpr):
    """Start copying a small vector to the L2 cache."""
    BYTES: tl.constexpr = SIZE * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    lanes = tl.arange(0, 32) * 128
    for start in tl.static_range(0, BYTES, 32 * 128):
        offsets = start + lanes
        ptrs = ptr.to(tl.pointer_type(tl.int8)) + tl.minimum(offsets, BYTES - 1)
        _once(ptrs, offsets < BYTES, "prefetch.global.L2 [$1]")


@triton.jit
def ask_for_later_rows(
    weight_ptr,
    ahead,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Start copying a later program's BLOCK_N rows of a weight, [N or gated 2 * N, WIDTH], to the
    L2 cache: those of the program `ahead` places on, as one of the first so many."""
    BYTES: tl.constexpr = BLOCK_N * WIDTH * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    COPY: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 1024"
    program = tl.program_id(0)
    later = program + ahead
    if (program < ahead) & ((later + 1) * BLOCK_N <= N):
        rows = weight_ptr + later.to(tl.int64) * (BLOCK_N * WIDTH)
        lanes = tl.arange(0, 32) * 1024
        for start in tl.static_range(0, BYTES, 32 * 1024):
            offsets = start + lanes
            mask = offsets < BYTES
            offsets = tl.minimum(offsets, BYTES - 1024)
            _once(rows.to(tl.pointer_type(tl.int8)) + offsets, mask, COPY)
            if GATED:
                up_rows = rows + tl.full([], N * WIDTH, tl.int64)
                _once(up_rows.to(tl.pointer_type(tl.int8)) + offsets, mask, COPY)


@triton.jit
def load_pair(ptr, offs_n, in_n, N: tl.constexpr, GATED: tl.constexpr, GIVEN: tl.constexpr):
    """Return float32 numbers n, and gated N + n, of a vector; zeros if it is not GIVEN."""
    first = tl.zeros(offs_n.shape, tl.float32)
    second = first
    if GIVEN:
        first = tl.load(ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
        if GATED:
            second = tl.load(ptr + N + offs_n, mask=in_n, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def apply_bias_and_gate(
    acc,
    up_acc,
    bias_ptr,
    offs_n,
    in_n,
    N: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Return acc + bias; gated, `gated_product` of it and up_acc + bias. offs_n: bias indices."""
    if BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
        acc += bias if len(acc.shape) == 1 else bias[:, None]
    if GATED:
        if BIAS:
            bias = tl.load(bias_ptr + N + offs_n, mask=in_n, other=0.0).to(tl.float32)
            up_acc += bias if len(acc.shape) == 1 else bias[:, None]
        acc = gated_product(acc, up_acc, ALPHA, LIMIT)
    return acc


@triton.jit
def row_epilogue(
    acc,
    up_acc,
    out_ptr,
    bias,
    up_bias,
    residual,
    offs_n,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Store the sums of a single row, [BLOCK_N], with bias, gate or activation, then times FACTOR,
    and with the residual. bias, up_bias, residual: [BLOCK_N], zeros where there is none."""
    acc += bias
    if GATED:
        acc = gated_product(acc, up_acc + up_bias, None, None)
    acc = activated(acc, ACTIVATION)
    if FACTOR != 1.0:
        acc *= FACTOR
    acc += residual
    tl.store(out_ptr + offs_n, acc.to(out_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def split_k_epilogue(
    acc,
    up_acc,
    out_ptr,
    partial_ptr,
    counter_ptr,
    bias_ptr,
    residual_ptr,
    M,
    stride_out,
    stride_residual,
    offs_n,
    offs_m,
    N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Store a tile's sums, [BLOCK_N, BLOCK_M], with bias, gate and residual.

    With SPLIT_K > 1 the sums are those of one of SPLIT_K programs (program_id(2)), which leaves
    them in partial_ptr; the last program to arrive, by the tile's counter, adds all of them in a
    fixed order, so that the result is deterministic, and resets the counter to zero.
    """
    in_n = offs_n < N
    mask = in_n[:, None] & (offs_m < M)[None, :]
    if SPLIT_K > 1:
        split = tl.program_id(2)
        # [SPLIT_K, M, N], and the same again for gates' partners.
        offsets = offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
        size = M.to(tl.int64) * N
        tl.store(partial_ptr + split * size + offsets, acc, mask=mask)
        if GATED:
            tl.store(partial_ptr + (SPLIT_K + split) * size + offsets, up_acc, mask=mask)
        tl.debug_barrier()
        counter = counter_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") != SPLIT_K - 1:
            return
        tl.store(counter, 0)
        acc = tl.zeros(acc.shape, tl.float32)
        if GATED:
            up_acc = tl.zeros(acc.shape, tl.float32)
        for other in tl.static_range(SPLIT_K):
            partial = partial_ptr + other * size + offsets
            acc += tl.load(partial, mask=mask, other=0.0, cache_modifier=".cg")
            if GATED:
                partial += SPLIT_K * size
                up_acc += tl.load(partial, mask=mask, other=0.0, cache_modifier=".cg")
    acc = apply_bias_and_gate(acc, up_acc, bias_ptr, offs_n, in_n, N, GATED, BIAS, None, None)
    if RESIDUAL:
        offsets = offs_m.to(tl.int64)[None, :] * stride_residual + offs_n[:, None]
        acc += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    offsets = offs_m.to(tl.int64)[None, :] * stride_out + offs_n[:, None]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
