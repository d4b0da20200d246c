"""Mixtures of experts: a part of `Operations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from ..activations import ExpertActivation
from ..quantized_weight import QuantizedWeight, dequantize
from ..routing import Routing, RoutingRule, choose_experts
from .products import ProductOperations


class DenseRows(NamedTuple):
    """A weight that only its layer can read."""

    out_features: int
    rows: Callable[[torch.Tensor], torch.Tensor]
    """Indices [num_rows] int64 → those rows, dequantised, [num_rows, in_features]"""


ExpertWeight: TypeAlias = torch.Tensor | QuantizedWeight | DenseRows
"""One linear layer of E experts, stacked: a weight of [E * out_features, in_features]."""


class ExpertOperations(ProductOperations):
    """T tokens, E experts."""

    def route(self, logits: torch.Tensor, rule: RoutingRule) -> Routing:
        """Choose each token's experts. logits: [T, num_experts]; of equal scores, the lower number
        is chosen."""
        return choose_experts(logits, rule)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        *,
        residual: torch.Tensor | None,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: ExpertActivation | None = None,
    ) -> torch.Tensor:
        """residual + Σ weight * down_e(silu(gate_e(x)) * up_e(x)) over each token's experts e.

        x, residual: [T, hidden_size]; gate_up: E experts' [2 * inner, hidden_size], gate first;
        down: E experts' [hidden_size, inner] → [T, hidden_size]. `residual` may be overwritten.
        Biases: [E * 2 * inner] and [E * hidden_size], added to the products of each expert's
        layers; `activation`: in place of silu(gate) * up. Only models that have these three pass
        them (`features`). Without a residual, which only operations with the feature `no_residual`
        get: the sum alone. With "relu2", gate_up has E experts' [inner, hidden_size]: up alone.
        With `Routing.num_experts`, experts below 0 or from E on are other ranks', and add nothing;
        only operations with the feature `foreign` get that.

        The reference computes one expert at a time. On a device that runs asynchronously to the
        host, each expert computes all tokens: the launches then do not depend on the routing, and a
        graph can contain them.
        """
        num_experts = num_rows(down) // x.shape[1]
        rows_up, rows_down = num_rows(gate_up) // num_experts, x.shape[1]
        out = torch.zeros_like(x)
        for expert in range(num_experts):
            chosen = routing.experts == expert
            tokens: slice | torch.Tensor = slice(None)
            if x.device.type == "cpu":
                tokens = chosen.any(dim=1).nonzero()[:, 0]
                if not len(tokens):
                    continue
            first = dense_rows(gate_up, expert * rows_up, rows_up, x)
            second = dense_rows(down, expert * rows_down, rows_down, x)
            biases = [
                None if bias is None else bias[expert * rows : (expert + 1) * rows]
                for bias, rows in ((gate_up_bias, rows_up), (down_bias, rows_down))
            ]
            if activation is None:
                inner = self.gated_linear(x[tokens], first, biases[0])
            else:
                inner = self.activated(self.linear(x[tokens], first, biases[0]), activation)
            output = self.linear(inner, second, biases[1])
            weight = (routing.weights * chosen).sum(dim=1, keepdim=True).to(x.dtype)
            out[tokens] += output * weight[tokens]
        return out if residual is None else residual + out

    def activated(
        self, products: torch.Tensor, activation: ExpertActivation | None
    ) -> torch.Tensor:
        """Return inner values of experts from their first layer's products: [N, 2 * inner], gate
        first, or with "relu2", [N, inner] → [N, inner]."""
        if activation is None:
            return self.silu_mul(products)
        if activation == "relu2":
            return F.relu(products).square()
        if activation == "gelu":
            return self.gelu_mul(products)
        return self.pointwise(activation.__call__, *products.chunk(2, dim=-1))

    def expert_products(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weight: ExpertWeight,
        num_experts: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """W_e x + bias_e, of one expert e per row.

        x: [N, in_features]; experts: [N] int32; weight: E experts' [out_features, in_features];
        bias: [E * out_features] → [N, out_features]. Rows of experts below 0 or from E on, which
        other ranks have, are 0.

        The reference computes one expert at a time, and waits for the routing.
        """
        size = num_rows(weight) // num_experts
        out = x.new_zeros(len(x), size)
        for expert in experts.unique().tolist():
            if not 0 <= expert < num_experts:
                continue
            rows = (experts == expert).nonzero()[:, 0]
            own = dense_rows(weight, expert * size, size, x)
            out[rows] = self.linear(
                x[rows], own, None if bias is None else bias[expert * size : (expert + 1) * size]
            )
        return out


def num_rows(weight: ExpertWeight) -> int:
    """Return the rows of a weight, of all experts."""
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) else weight.out_features


def dense_rows(weight: ExpertWeight, start: int, count: int, x: torch.Tensor) -> torch.Tensor:
    """Return rows `start` .. `start + count` of a weight, dense, for products with inputs `x`."""
    if isinstance(weight, torch.Tensor):
        return weight[start : start + count]
    indices = torch.arange(start, start + count, device=x.device)
    if isinstance(weight, DenseRows):
        return weight.rows(indices)
    return dequantize(weight.rows(indices), x.dtype)
