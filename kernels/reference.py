"""Torch twins of the kernels: the same computations in float32.

Same arguments as the launchers, any device. If a kernel rounds intermediate values to the storage
type (RMSNorm before its weight), so does its reference, so that the two agree to a few units in the
last place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .activations import ACTIVATIONS
from .quant.quantized_weight import QuantizedWeight, Weight, weight_arguments

ACTIVATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(), "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [..., hidden_size] → x / sqrt(mean(x²) + eps), rounded to weight's type, times weight;
    residual, of x's shape, is added to the rounded result."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    out = (normed.to(weight.dtype).float() * weight.float()).to(x.dtype)
    return out if residual is None else residual + out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [..., 2 * size], gate then up → silu(gate) * up, [..., size], in float32 until the end."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def gemv(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    layer_norm: tuple[torch.Tensor, torch.Tensor | None, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "",
    factor: float = 1.0,
) -> torch.Tensor:
    """residual + factor * activation(norm(x) Wᵀ + bias), or silu(gate) * up of it; float32 until
    the end.

    x: [M, K], any number of rows; weight: [N, K], the gate's rows first when gated.
    """
    if not isinstance(weight, torch.Tensor):
        weight = dequantize_weight(weight, torch.float32)
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm[1])
        wide = wide * norm[0].float()
    if layer_norm is not None:
        factors, offsets, eps = layer_norm
        offsets = None if offsets is None else offsets.float()
        wide = torch.nn.functional.layer_norm(wide, wide.shape[-1:], factors.float(), offsets, eps)
    out = wide @ weight.float().t()
    if bias is not None:
        out = out + bias.float()
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate) * up
    if activation:
        out = ACTIVATED[ACTIVATIONS[activation]](out)
    if residual is not None:
        out = factor * out + residual.float()
    return out.to(x.dtype)


def small_m_matmul(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """residual + x Wᵀ + bias, or silu(gate) * up of it; float32 until the end."""
    return gemv(x, weight, bias, residual=residual, gated=gated)


def mask_tokens(logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Set logits to -inf, in place, where a token's bit is off. Shapes as for the kernel."""
    shifts = torch.arange(32, device=bits.device)
    off = ((bits.unsqueeze(-1).long() >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 0
    for place, barred in enumerate(off):
        logits[place if rows is None else rows[place], barred] = float("-inf")


def quantize_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [num_rows, size] → (values of `dtype`, [num_rows] float32 scales)."""
    if norm is not None:
        x = rms_norm(x, *norm)
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.float()
    if scale is None:
        scales = wide.abs().amax(dim=1) / largest
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    else:
        scales = scale.float().expand(x.shape[0]).contiguous()
    values = (wide / scales[:, None]).clamp(-largest, largest)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scales


def _e2m1_numbers(words: torch.Tensor, run: int) -> torch.Tensor:
    """[N, width] int32 → [N, 8 * width] float32, number by number as quantized_weight.py has it"""
    rows, width = words.shape
    out = torch.empty(rows, 8 * width, device=words.device)
    for first in range(0, width, run):
        count = min(run, width - first)
        for part in range(8):
            bits = words[:, first : first + count] >> (part // 4 * 16)
            size = bits >> (part % 4 * 3) & 7
            sign = 1 - 2 * (bits >> (14, 12, 15, 13)[part % 4] & 1)
            exponent, fraction = (size >> 1).float(), (size & 1).float()
            number = torch.where(
                exponent > 0, (1 + fraction / 2) * 2 ** (exponent - 1), fraction / 2
            )
            column = 8 * first + part * count
            out[:, column : column + count] = number * sign
    return out


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """→ [N, K]: (value - zero) * scale; layouts as in quantized_weight.py."""
    if weight.e2m1_run is not None:
        values = _e2m1_numbers(weight.values, weight.e2m1_run)
    elif weight.pack_factor > 1:
        mask = (1 << weight.bits) - 1
        parts = [(weight.values >> (i * weight.bits)) & mask for i in range(weight.pack_factor)]
        values = torch.cat(parts, dim=1).float()
    else:
        values = weight.values.float()
    groups = torch.arange(values.shape[1], device=values.device) // weight.group_size
    if weight.zero is None:
        values = values - weight_arguments(weight).format.offset
    else:
        values = values - weight.zero.t().float()[:, groups]
    scale = weight.scale.t().float().repeat_interleave(weight.scale_rows, dim=0)
    return (values * scale[: values.shape[0], groups]).to(dtype)


def split_k_sum(
    partial: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    row_scale: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    total = partial.float().sum(dim=0)
    if row_scale is not None and column_scale is not None:
        total = total * row_scale.float()[:, None] * column_scale.float()
    if bias is not None:
        total = total + bias.float()
    if residual is not None:
        total = total + residual.float()
    return out.copy_(total)
