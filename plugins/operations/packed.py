"""Which kernel multiplies by a quantized weight, by the number of tokens and what the device has.

One token: a matrix-vector product with all around it. A few: dequantised on the way to the matrix
unit; 4-bit numbers have kernels of their own for both. Many: inputs are rounded as well and
multiplied in 8 bits, where the weight allows that; otherwise the weight is unpacked once for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...core.nn.operations import Norm, Operations
from ...core.nn.packed import PackedWeight
from ...kernels.finish_product import finish_product
from ...kernels.nibble_gemv import nibble_gemv
from ...kernels.nibble_skinny import nibble_skinny
from ...kernels.nibbles import run_of_words
from ...kernels.packed_gemv import packed_gemv
from ...kernels.packed_matmul import packed_matmul, packed_matmul_serves
from ...kernels.packed_weight import Packed
from ...kernels.quantize_rows import quantize_rows
from ...kernels.skinny import SkinnyWorkspace, elements
from ...kernels.tuning import Product, nibble_gemv_shape, nibble_skinny_shape
from ...kernels.unpack_weight import unpack_weight

SMALLEST_RUN = 16
"""Words of a row that the kernels of 4-bit numbers take at least."""
FEW_TOKENS = 16
"""Up to so many, reading the weight decides: inputs stay wide."""
FEW_TOKENS_WIDE = 256
"""The same where inputs are never rounded: beyond, unpacking the weight costs less."""


def packed_product(
    operations: Operations,
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
    workspace: Callable[[torch.device], SkinnyWorkspace],
) -> torch.Tensor:
    """residual + norm(x) Wᵀ + bias, or silu(gate) * up of it; `residual` may be overwritten.

    What is launched depends on shapes and types alone, so it may be captured in a graph.
    """
    if weight.order is not None:
        x = (x if norm is None else operations.rms_norm(x, norm)).index_select(1, weight.order)
        norm = None
    packed = Packed(
        weight.values, weight.scale, weight.zero, weight.group_size, weight.scale_rows, weight.bits
    )
    num_tokens = x.shape[0]
    if num_tokens and _takes_nibbles(x, packed):
        return _product_of_nibbles(
            operations, x, packed, bias, norm, residual, gated, workspace(x.device)
        )
    if num_tokens == 1:
        return packed_gemv(x, packed, bias, norm=norm, residual=residual, gated=gated)
    in_8_bits = num_tokens > FEW_TOKENS and multiplies_8_bits(weight)
    few = FEW_TOKENS if in_8_bits else FEW_TOKENS_WIDE
    if in_8_bits:
        out = _product_in_8_bits(x, weight, bias, norm, residual)
    elif num_tokens <= few and packed_matmul_serves(packed):
        if norm is not None:
            x = operations.rms_norm(x, norm)
        out = packed_matmul(x, packed, bias, residual=residual, num_sms=_num_sms(x.device))
    else:
        dense = unpack_weight(packed, x.dtype)
        out = operations.linear(x, dense, bias, norm=norm, residual=residual)
    return operations.silu_mul(out) if gated else out


def _takes_nibbles(x: torch.Tensor, weight: Packed) -> bool:
    """Whether the kernels of 4-bit numbers can do it."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not run_of_words(weight, SMALLEST_RUN):
        return False
    return x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (9, 0)


def _product_of_nibbles(
    operations: Operations,
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
    workspace: SkinnyWorkspace,
) -> torch.Tensor:
    """In one kernel, with few tokens, and one for the norm unless it is one token."""
    num_tokens = x.shape[0]
    outputs = weight.values.shape[0] // (2 if gated else 1)
    product = Product(outputs, weight.size, gated)
    if norm is not None and (num_tokens > 1 or x.dtype == torch.float16):
        # Before it is divided by its size, x times the norm's weight may be too large.
        x, norm = operations.rms_norm(x, norm), None
    if num_tokens == 1:
        shape = nibble_gemv_shape(product, x.device)
        return nibble_gemv(x, weight, bias, norm=norm, residual=residual, gated=gated, shape=shape)
    cut = nibble_skinny_shape(product, num_tokens, x.device)
    if cut is None:
        out = operations.linear(x, unpack_weight(weight, x.dtype), bias, residual=residual)
        return operations.silu_mul(out) if gated else out
    if elements(num_tokens, outputs, cut.split, gated) > workspace.floats.numel():
        cut = cut._replace(split=1)
    return nibble_skinny(
        x, weight, bias, residual=residual, gated=gated, shape=cut, workspace=workspace,
        out=residual,
    )  # fmt: skip


def _product_in_8_bits(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Inputs rounded to the weight's type, a scale a token, and multiplied as they are."""
    values, scales = quantize_rows(x, weight.values.dtype, norm=norm, scale=weight.input_scale)
    shape = (x.shape[0], weight.out_features)
    if weight.values.dtype == torch.int8:
        sums = torch._int_mm(values, weight.values.t())
        out = residual if residual is not None else x.new_empty(shape)
        return finish_product(
            sums[None], out, bias, row_scale=scales, column_scale=weight.scale[0], residual=residual
        )
    out = torch._scaled_mm(
        values,
        weight.values.t(),
        scale_a=scales[:, None],
        scale_b=weight.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    if residual is None and bias is None and x.dtype == out.dtype:
        return out
    into = residual if residual is not None else x.new_empty(shape)
    return finish_product(out[None], into, bias, residual=residual)


def multiplies_8_bits(weight: PackedWeight) -> bool:
    """Whether inputs may be rounded to the weight's type, and the device multiplies the two, with a
    scale for each row of both."""
    rows, size = weight.values.shape
    if (
        weight.inputs != "quantized"
        or weight.is_words
        or weight.group_size < size
        or weight.scale_rows > 1
        or weight.zero is not None
    ):
        return False
    if weight.values.device.type != "cuda" or rows % 16 or size % 16:
        return False
    capability = torch.cuda.get_device_capability(weight.values.device)
    # Of fp8 products with a scale a row, torch has those for Hopper and later.
    return capability >= ((9, 0) if weight.values.dtype == torch.float8_e4m3fn else (8, 0))


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors; some number where there are none."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
