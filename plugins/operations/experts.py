"""A mixture's layer on kernels: slot by slot where tokens are few, sorted by expert where many."""

from __future__ import annotations

import torch

from ...core.nn.operations import ClampedSwiGLU, DenseRows, ExpertWeight, Routing
from ...core.nn.packed import PackedWeight
from ...kernels.expert_bank import Bank, values_of
from ...kernels.expert_gemv import expert_gemv
from ...kernels.expert_matmul import expert_matmul, expert_matmul_serves
from ...kernels.expert_slots import expert_slots
from ...kernels.gates import Clamp
from ...kernels.packed_weight import Packed
from ...kernels.quantize_rows import quantize_rows
from ...kernels.sum_slots import sum_slots
from .packed import multiplies_8_bits


def few_slots(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether each token is to read its experts' weights for itself.

    Measured on an H200: with half as many slots as experts (64 of 128) the products take as long
    either way and nothing is sorted; with as many, sorting reads a fifth less.
    """
    return num_tokens == 1 or num_tokens * top_k <= num_experts // 2


def experts_serve(gate_up: ExpertWeight, down: ExpertWeight) -> bool:
    """Whether the kernels can take these weights, with any number of tokens."""
    return not any(
        isinstance(weight, DenseRows) or not expert_matmul_serves(_bank(weight))
        for weight in (gate_up, down)
    )


def experts_product(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    residual: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: ClampedSwiGLU | None = None,
) -> torch.Tensor:
    """As `Operations.experts`, into `residual`.

    What is launched depends on shapes and types alone, so it may be captured in a graph.
    """
    num_tokens, top_k = routing.experts.shape
    num_experts = values_of(_bank(down)).shape[0] // x.shape[1]
    clamp = None if activation is None else Clamp(*activation)
    if few_slots(num_tokens, top_k, num_experts):
        inner = expert_gemv(
            _ordered(x, gate_up), routing.experts, _bank(gate_up), num_experts,
            bias=gate_up_bias, clamp=clamp,
        )  # fmt: skip
        return expert_gemv(
            _ordered(inner, down), routing.experts, _bank(down), num_experts,
            factor=routing.weights, residual=residual, out=residual, bias=down_bias, known=True,
        )  # fmt: skip
    lists = expert_slots(routing.experts, num_experts)
    inner = _product(x, gate_up, lists, top_k, gate_up_bias, gated=True, clamp=clamp)
    parts = _product(inner, down, lists, top_k, down_bias, gated=False)
    return sum_slots(parts, routing.weights, residual, residual)


def _product(
    x: torch.Tensor,
    weight: ExpertWeight,
    lists: tuple[torch.Tensor, torch.Tensor],
    top_k: int,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    clamp: Clamp | None = None,
) -> torch.Tensor:
    """By the experts that `expert_slots` listed, in 8 bits where that is wanted and possible."""
    dtype, scale = x.dtype, None
    x = _ordered(x, weight)
    if isinstance(weight, PackedWeight) and multiplies_8_bits(weight):
        x, scale = quantize_rows(x, weight.values.dtype, scale=weight.input_scale)
    return expert_matmul(
        x, *lists, _bank(weight), top_k=top_k, gated=gated, x_scale=scale, bias=bias, clamp=clamp,
        dtype=dtype,
    )  # fmt: skip


def _bank(weight: ExpertWeight) -> Bank:
    assert not isinstance(weight, DenseRows), "only its layer can read it"
    if not isinstance(weight, PackedWeight):
        return weight
    return Packed(
        weight.values, weight.scale, weight.zero, weight.group_size, weight.scale_rows, weight.bits
    )


def _ordered(x: torch.Tensor, weight: ExpertWeight) -> torch.Tensor:
    """Inputs in the order of the weight's columns."""
    if not isinstance(weight, PackedWeight) or weight.order is None:
        return x
    return x.index_select(1, weight.order)
