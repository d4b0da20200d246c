"""Operations on Triton kernels in which a row's result does not depend on the rows beside it.

Each product has one tile, whatever the number of rows: a tensor core adds the products of a row and
a column in the same order, wherever the row lies in the tile. Sums that several programs share are
added in one order, which a single program keeps, too. Norms, rotations and activations are those of
other steps: they compute a row per program.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...core.nn.activations import ExpertActivation
from ...core.nn.operations import AnyNorm, ExpertWeight, Norm, Operations
from ...core.nn.quantized_weight import QuantizedWeight
from ...core.nn.routing import Routing, RoutingRule
from .triton import TritonOperations

try:
    from ...kernels.linear.quant_matmul import quant_matmul, quant_matmul_supports, uniform_config
    from ...kernels.linear.uniform_matmul import uniform_matmul
    from ...kernels.moe.topk_experts import ROWS
    from ...kernels.quant.dequantize import dequantize_weight
    from .experts import expert_products, experts_product, experts_serve
    from .layers import routed
except ImportError:
    pass  # `supports` says why.


class InvariantTritonOperations(TritonOperations):
    """For layers that attend to keys and values, and mixtures of experts."""

    name: ClassVar[str] = "triton_invariant"
    features: ClassVar[frozenset[str]] = TritonOperations.features - {"linear.norm_sums"}
    batch_invariant: ClassVar[bool] = True

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: AnyNorm | None = None,
        residual: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        if norm is not None:
            x = self.normed(x, norm)
        if factor != 1.0:
            out = self.linear(x, weight, bias)
            return out.mul_(factor) if residual is None else residual.add_(out, alpha=factor)
        return uniform_matmul(
            x, weight, bias, residual=residual, workspace=self._workspace(x.device), out=residual
        )

    def activated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: str,
        norm: AnyNorm | None = None,
    ) -> torch.Tensor:
        return Operations.activated_linear(self, x, weight, bias, activation=activation, norm=norm)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: AnyNorm | None = None,
    ) -> torch.Tensor:
        if norm is not None:
            x = self.normed(x, norm)
        workspace = self._workspace(x.device)
        return uniform_matmul(x, weight, bias, gated=True, workspace=workspace)

    def quantized_linear(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Inputs are never rounded: in other steps they are where there are many rows."""
        if norm is not None:
            x = self.rms_norm(x, norm)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if quant_matmul_supports(weight):
            out = quant_matmul(x, weight, bias, residual=residual, config=uniform_config(weight))
        else:
            out = self.linear(x, dequantize_weight(weight, x.dtype), bias, residual=residual)
        return self.silu_mul(out) if gated else out

    def route(self, logits: torch.Tensor, rule: RoutingRule) -> Routing:
        return routed(logits, rule, rows=ROWS)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        *,
        residual: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: ExpertActivation | None = None,
    ) -> torch.Tensor:
        if not experts_serve(gate_up, down):
            return Operations.experts(
                self, x, routing, gate_up, down, residual=residual, gate_up_bias=gate_up_bias,
                down_bias=down_bias, activation=activation,
            )  # fmt: skip
        return experts_product(
            x, routing, gate_up, down, residual=residual, gate_up_bias=gate_up_bias,
            down_bias=down_bias, activation=activation, uniform=True,
        )  # fmt: skip

    def expert_products(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weight: ExpertWeight,
        num_experts: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not experts_serve(weight):
            return Operations.expert_products(self, x, experts, weight, num_experts, bias)
        return expert_products(x, experts, weight, num_experts, bias, uniform=True)
