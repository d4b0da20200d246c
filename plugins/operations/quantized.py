"""Chooses the kernel for a quantized weight, by the number of tokens and the device.

One token: a fused matrix-vector product. A few: dequantised before the tensor core; 4-bit numbers
in one kernel with gate and residual. Many: inputs are rounded and multiplied in 8 bits, if the
weight allows it; otherwise the weight is dequantised first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...core.nn.operations import Norm, Operations
from ...core.nn.quantized_weight import QuantizedWeight
from ...kernels.linear.gemv import gemv
from ...kernels.linear.int4_gemv import int4_gemv
from ...kernels.linear.quant_matmul import (
    quant_matmul,
    quant_matmul_supports,
    uniform_config,
)
from ...kernels.linear.small_m_matmul import (
    SplitKWorkspace,
    small_m_matmul,
    split_k_floats,
)
from ...kernels.linear.split_k_sum import split_k_sum
from ...kernels.quant.dequantize import dequantize_weight
from ...kernels.quant.int4_unpack import int4_tile
from ...kernels.quant.quantize_rows import quantize_rows
from ...kernels.tuning import (
    Product,
    int4_gemv_config,
    int4_small_m_config,
)

SMALLEST_TILE = 16
"""Fewest words of a row for 4-bit kernels."""
FEW_TOKENS = 16
"""Most tokens for which inputs are not quantized: reading the weight dominates."""
FEW_TOKENS_WIDE = 256
"""The same for inputs that are never rounded: beyond, dequantising the weight costs less."""


def quantized_product(
    operations: Operations,
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
    workspace: Callable[[torch.device], SplitKWorkspace],
    uniform: bool = False,
) -> torch.Tensor:
    """Return residual + norm(x) Wᵀ + bias, or silu(gate) * up of it; `residual` may be overwritten.

    Launches depend only on shapes and types, so a graph may contain them. `uniform`: any number of
    tokens are multiplied in tiles of one size, and inputs are never rounded.
    """
    if weight.order is not None:
        x = (x if norm is None else operations.rms_norm(x, norm)).index_select(1, weight.order)
        norm = None
    num_tokens = x.shape[0]
    integers = weight.e2m1_run is None
    if not uniform:
        if num_tokens and (integers or num_tokens == 1) and _takes_int4(x, weight):
            return _int4_product(
                operations, x, weight, bias, norm, residual, gated, workspace(x.device)
            )
        if num_tokens == 1:
            return gemv(x, weight, bias, norm=norm, residual=residual, gated=gated)
    in_8_bits = not uniform and num_tokens > FEW_TOKENS and multiplies_8_bits(weight)
    few = uniform or num_tokens <= (FEW_TOKENS if in_8_bits else FEW_TOKENS_WIDE)
    if in_8_bits:
        out = _product_in_8_bits(x, weight, bias, norm, residual)
    elif few and quant_matmul_supports(weight):
        if norm is not None:
            x = operations.rms_norm(x, norm)
        out = quant_matmul(
            x, weight, bias, residual=residual, num_sms=_num_sms(x.device),
            config=uniform_config(weight) if uniform else None,
        )  # fmt: skip
    else:
        dense = dequantize_weight(weight, x.dtype)
        out = operations.linear(x, dense, bias, norm=norm, residual=residual)
    return operations.silu_mul(out) if gated else out


def _takes_int4(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Return whether the tensor core can multiply the weight's 4-bit numbers."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not int4_tile(weight, SMALLEST_TILE):
        return False
    return x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (9, 0)


def _int4_product(
    operations: Operations,
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
    workspace: SplitKWorkspace,
) -> torch.Tensor:
    """Use one kernel for few tokens, and one for the norm of several."""
    num_tokens = x.shape[0]
    outputs = weight.values.shape[0] // (2 if gated else 1)
    product = Product(outputs, weight.in_features, gated)
    if norm is not None and (num_tokens > 1 or x.dtype == torch.float16):
        # Before it is divided by its size, x times the norm's weight may be too large.
        x, norm = operations.rms_norm(x, norm), None
    if num_tokens == 1:
        tiles = int4_gemv_config(product, x.device)
        return int4_gemv(x, weight, bias, norm=norm, residual=residual, gated=gated, config=tiles)
    config = int4_small_m_config(product, num_tokens, x.device)
    if config is None:
        dense = dequantize_weight(weight, x.dtype)
        out = operations.linear(x, dense, bias, residual=residual)
        return operations.silu_mul(out) if gated else out
    if split_k_floats(num_tokens, outputs, config.split_k, gated) > workspace.floats.numel():
        config = config._replace(split_k=1)
    return small_m_matmul(
        x, weight, bias, residual=residual, gated=gated, config=config, workspace=workspace,
        out=residual,
    )  # fmt: skip


def _product_in_8_bits(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply in the weight's type, rounding inputs with one scale per token."""
    values, scales = quantize_rows(x, weight.values.dtype, norm=norm, scale=weight.input_scale)
    shape = (x.shape[0], weight.out_features)
    if weight.values.dtype == torch.int8:
        sums = torch._int_mm(values, weight.values.t())
        out = residual if residual is not None else x.new_empty(shape)
        return split_k_sum(
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
    return split_k_sum(out[None], into, bias, residual=residual)


def multiplies_8_bits(weight: QuantizedWeight) -> bool:
    """Return whether inputs may be rounded to the weight's type and the device multiplies 8 bits
    with row scales.
    """
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
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
