"""A mixture's layer on kernels: slot by slot for few tokens, sorted by expert for many."""

from __future__ import annotations

from typing import Any

import torch

from ...core.nn.activations import ClampedSwiGLU, ExpertActivation, LimitedSwiGLU
from ...core.nn.layer_operations.experts import DenseRows, ExpertWeight
from ...core.nn.quantized_weight import QuantizedWeight
from ...core.nn.routing import Routing
from ...kernels.activations import Clamp, GatedActivation, Limit
from ...kernels.moe.combine import combine
from ...kernels.moe.expert_gemv import expert_gemv
from ...kernels.moe.expert_matmul import (
    expert_matmul,
    expert_matmul_config,
    expert_matmul_supports,
)
from ...kernels.moe.expert_word_gemv import expert_word_gemv, takes_words
from ...kernels.moe.sort_tokens import sort_tokens
from ...kernels.quant.quantize_rows import quantize_rows
from ...kernels.quant.quantized_weight import Weight, values_of
from .quantized import multiplies_8_bits

UNIFORM_SLOTS = 48
"""Slots per expert whose tiles serve any number of them."""


def few_slots(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Return whether each token reads its experts' weights separately.

    On an H200, both are as fast with half as many slots as experts.
    """
    return num_tokens == 1 or num_tokens * top_k <= num_experts // 2


def experts_serve(*weights: ExpertWeight) -> bool:
    """Return whether the kernels support these weights, with any number of tokens."""
    return not any(
        isinstance(weight, DenseRows) or not expert_matmul_supports(_kernel_weight(weight))
        for weight in weights
    )


def experts_product(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    residual: torch.Tensor | None,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: ExpertActivation | None = None,
    uniform: bool = False,
) -> torch.Tensor:
    """As `Operations.experts`, into `residual` if there is one.

    Launches depend only on shapes and types, so a graph may contain them. `uniform`: any number of
    tokens are multiplied in tiles of one size.
    """
    num_tokens, top_k = routing.experts.shape
    num_experts = values_of(_kernel_weight(down)).shape[0] // x.shape[1]
    gated = activation != "relu2"
    gate: GatedActivation | None = "gelu" if activation == "gelu" else None
    if isinstance(activation, ClampedSwiGLU):
        gate = Clamp(*activation)
    elif isinstance(activation, LimitedSwiGLU):
        gate = Limit(*activation)
    # With experts on other ranks, too, this rank has few slots where all of them have.
    total, foreign = routing.num_experts or num_experts, routing.num_experts is not None
    if not uniform and few_slots(num_tokens, top_k, total):
        inner = _slots_product(
            x, routing.experts, gate_up, num_experts, bias=gate_up_bias, activation=gate,
            gated=gated, foreign=foreign,
        )  # fmt: skip
        return _slots_product(
            inner, routing.experts, down, num_experts, factor=routing.weights, residual=residual,
            out=residual, bias=down_bias, known=True, foreign=foreign,
        )  # fmt: skip
    lists = sort_tokens(routing.experts, num_experts)
    inner = _product(
        x,
        gate_up,
        lists,
        top_k,
        total,
        gate_up_bias,
        gated=gated,
        squared=not gated,
        activation=gate,
        uniform=uniform,
    )
    parts = _product(inner, down, lists, top_k, total, down_bias, gated=False, uniform=uniform)
    out = torch.empty_like(x) if residual is None else residual
    return combine(
        parts, routing.weights, residual, out, experts=routing.experts if foreign else None,
        own=num_experts if foreign else None,
    )  # fmt: skip


def expert_products(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: ExpertWeight,
    num_experts: int,
    bias: torch.Tensor | None = None,
    *,
    uniform: bool = False,
) -> torch.Tensor:
    """As `Operations.expert_products`. Launches depend only on shapes and types. `uniform`: as for
    `experts_product`."""
    lists = sort_tokens(experts[:, None], num_experts)
    out = _product(x, weight, lists, 1, num_experts, bias, gated=False, uniform=uniform)
    elsewhere = (experts < 0) | (experts >= num_experts)  # No program has written these rows.
    return out.masked_fill_(elsewhere[:, None], 0.0)


def _slots_product(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: ExpertWeight,
    num_experts: int,
    **options: Any,
) -> torch.Tensor:
    x, read = _ordered(x, weight), _kernel_weight(weight)
    if takes_words(read, x):
        return expert_word_gemv(x, experts, read, num_experts, **options)
    return expert_gemv(x, experts, read, num_experts, **options)


def _product(
    x: torch.Tensor,
    weight: ExpertWeight,
    lists: tuple[torch.Tensor, torch.Tensor],
    top_k: int,
    total: int,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    squared: bool = False,
    activation: GatedActivation | None = None,
    uniform: bool = False,
) -> torch.Tensor:
    """Multiply by the listed experts, in 8 bits if the weight requires it and products are not
    `uniform`. `total`: number of experts that share the slots.
    """
    dtype, scale = x.dtype, None
    x = _ordered(x, weight)
    if not uniform and isinstance(weight, QuantizedWeight) and multiplies_8_bits(weight):
        x, scale = quantize_rows(x, weight.values.dtype, scale=weight.input_scale)
    slots = lists[0].shape[1] * top_k
    if uniform:
        slots, total = UNIFORM_SLOTS, 1
    config = expert_matmul_config(
        slots, total, _kernel_weight(weight), gated, in_8_bits=scale is not None
    )
    return expert_matmul(
        x, *lists, _kernel_weight(weight), top_k=top_k, gated=gated, x_scale=scale, bias=bias,
        activation=activation, squared=squared, dtype=dtype, config=config,
    )  # fmt: skip


def _kernel_weight(weight: ExpertWeight) -> Weight:
    assert not isinstance(weight, DenseRows), "only its layer can read it"
    return weight


def _ordered(x: torch.Tensor, weight: ExpertWeight) -> torch.Tensor:
    if not isinstance(weight, QuantizedWeight) or weight.order is None:
        return x
    return x.index_select(1, weight.order)
