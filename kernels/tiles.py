"""Functions that kernels of matrix products share: loading a tile, and the epilogue.

Sums are float32, of BLOCK_N outputs of one row ([BLOCK_N]) or of BLOCK_M rows ([BLOCK_N, BLOCK_M]:
the weight's rows take the tensor core's long side). A gated product has two sums: `acc` for outputs
n, the gate, and `up_acc` for outputs N + n.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import activated, gated_product


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
    """Start copying BYTES (a string) from each of ptrs to the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], " + BYTES + "; mov.u32 $0, 0;",
        "=r,l",
        [ptrs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_l2_for(weight_ptr, num_bytes, number, count):
    """Start copying the first bytes of a weight to the L2 cache, as program `number` of `count`."""
    weight_ptr = weight_ptr.to(tl.pointer_type(tl.int8))
    lanes = tl.arange(0, 128) * 1024
    for start in range(number * (128 * 1024), num_bytes, count * (128 * 1024)):
        prefetch_l2(weight_ptr + tl.minimum(start + lanes, num_bytes - 1024), "1024")


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
    bias_ptr,
    residual_ptr,
    offs_n,
    N: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Store the sums of a single row, [BLOCK_N], with bias, gate or activation, then times FACTOR,
    and with the residual."""
    in_n = offs_n < N
    acc = apply_bias_and_gate(acc, up_acc, bias_ptr, offs_n, in_n, N, GATED, BIAS, None, None)
    acc = activated(acc, ACTIVATION)
    if FACTOR != 1.0:
        acc *= FACTOR
    if RESIDUAL:
        acc += tl.load(residual_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, acc.to(out_ptr.dtype.element_ty), mask=in_n)


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
