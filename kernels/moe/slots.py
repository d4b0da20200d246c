"""What products slot by slot share: their arguments, and the sums of a token's slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..activations import GatedActivation, gate_constants, squared_relu
from ..pdl import pdl_options
from ..quant.quantized_weight import Weight, values_of, weight_arguments
from ..tiles import apply_bias_and_gate

PREFETCH_BYTES = 32 << 20
"""Most bytes of weights prefetched before their kernel runs: most of an H200's L2 cache would be
evicted by more."""


@triton.jit
def store_slots(
    sums,
    up_sums,
    out_ptr,
    bias_ptr,
    factor_ptr,
    residual_ptr,
    stride_out,
    stride_residual,
    target,
    tile_n,
    slot,
    rows,
    in_r,
    N: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SQUARED: tl.constexpr,
    FACTOR: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the sums of a target's slots, [BLOCK_COUNT * BLOCK_N]: with bias, gate or activation,
    times a slot's factor, added up, and with the residual. slot, rows, in_r: the slot of each sum,
    its row of the weight, and whether it counts."""
    sums = apply_bias_and_gate(sums, up_sums, bias_ptr, rows, in_r, N, GATED, BIAS, ALPHA, LIMIT)
    if SQUARED:
        sums = squared_relu(sums)
    if FACTOR:
        sums *= tl.load(factor_ptr + slot, mask=in_r, other=0.0)
    out = tl.sum(tl.reshape(sums, [BLOCK_COUNT, BLOCK_N]), axis=0)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < N
    if RESIDUAL:
        residual_ptrs = residual_ptr + target.to(tl.int64) * stride_residual + offs_n
        out += tl.load(residual_ptrs, mask=in_n, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + target.to(tl.int64) * stride_out + offs_n
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_n)


class SlotsProduct(NamedTuple):
    out: torch.Tensor
    outputs: int
    """Numbers per slot that are written"""
    width: int
    """Elements of a row of the weight"""
    summed: int
    targets: int
    """Rows of `out`, each of which has programs of its own; 0: nothing to do"""
    tensors: tuple[Any, ...]
    """`out` to `bias`, and the strides of out, x and residual"""
    strides: tuple[int, ...]
    """Of the weight, its scales and its zeros"""
    constants: dict[str, Any]

    @property
    def foreign(self) -> bool:
        return bool(self.constants["FOREIGN"])

    @property
    def block_count(self) -> int:
        return int(self.constants["BLOCK_COUNT"])

    def prefetches(self, row_bytes: int) -> bool:
        """Return whether weights with rows of so many bytes may be prefetched before the kernel
        runs: only the second product's, whose experts are known, on a GPU that overlaps kernels.
        More would evict the first prefetched ones.
        """
        num_bytes = self.targets * self.summed * self.outputs * row_bytes
        second, overlaps = self.constants["FACTOR"], self.constants["PDL"]
        return bool(second and overlaps and num_bytes <= PREFETCH_BYTES)


def slots_product(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: Weight,
    num_experts: int,
    *,
    factor: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    gated: bool = True,
    foreign: bool = False,
) -> SlotsProduct:
    """Without `factor`, gate and up of each slot: x [num_tokens, K] → [num_tokens * top_k, N / 2]
    of x's type. With it, down and the sum: x [num_tokens * top_k, K] and factor [num_tokens, top_k]
    float32 → residual + sum, [num_tokens, N].

    experts: [num_tokens, top_k] int32, contiguous; weight: [num_experts * N, K]; last strides 1;
    `out` may be the residual; bias: [num_experts * N], contiguous; `activation`: in place of
    silu(g) * u; without `gated`: relu(u)² of u alone, [num_tokens * top_k, N], in their place.
    `foreign`: experts below 0 or from num_experts on are another rank's; they add nothing to the
    sum, and nothing is written to their slots.
    """
    num_tokens, top_k = experts.shape
    first = factor is None
    gated = gated and first
    rows = values_of(weight).shape[0] // num_experts
    outputs = rows // 2 if gated else rows
    count, targets = (1, num_tokens * top_k) if first else (top_k, num_tokens)
    if out is None:
        out = torch.empty((targets, outputs), dtype=x.dtype, device=x.device)
    arguments = weight_arguments(weight)
    options = pdl_options(x.device)
    return SlotsProduct(
        out=out,
        outputs=outputs,
        width=arguments.format.width,
        summed=count,
        targets=targets,
        tensors=(
            out,
            x,
            experts,
            factor,
            residual,
            *arguments.tensors,
            bias,
            out.stride(0),
            x.stride(0),
            0 if residual is None else residual.stride(0),
        ),
        strides=arguments.strides,
        constants={
            "E": num_experts,
            "N": outputs,
            "FORMAT": arguments.format,
            "COUNT": count,
            "DIVIDE": top_k if first else 1,
            "GATED": gated,
            "FACTOR": not first,
            "RESIDUAL": residual is not None,
            "BIAS": bias is not None,
            **gate_constants(activation),
            "SQUARED": first and not gated,
            "FOREIGN": foreign,
            "BLOCK_COUNT": triton.next_power_of_2(count),
            "PDL": bool(options),
            **options,
        },
    )
