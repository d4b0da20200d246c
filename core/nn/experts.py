"""Mixture of experts: many gated MLPs, of which a router chooses a few for each token."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .context import BuildContext
from .linear import MergedLinear
from .operations import ClampedSwiGLU, ExpertWeight, Operations
from .quantized import QuantizedLinear

MOST_EXPERTS = 1 << 14
"""Sanity bound: layers of published models have less than a tenth of it."""


class Router(nn.Module):
    """weight: [num_experts, hidden_size], bias: [num_experts]. Never quantized: it is small, and
    rounding would change the choice of experts."""

    def __init__(
        self, num_experts: int, hidden_size: int, build: BuildContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(build.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(build.empty(num_experts)) if bias else None


class ExpertLinear(MergedLinear):
    """One linear layer of all experts, as one weight: [num_experts * out_features, in_features].

    It has one shard per expert, in order: "3" is the fourth expert's; if several layers are merged,
    one per expert and layer, such as "3.gate". To a quantization method it is a merged layer with
    the role "experts".
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        sizes: dict[str, int],
        build: BuildContext,
        *,
        bias: bool = False,
    ) -> None:
        shards = {
            f"{expert}.{name}" if name else str(expert): size
            for expert in range(num_experts)
            for name, size in sizes.items()
        }
        super().__init__(in_features, shards, build, bias=bias)

    @property
    def bank(self) -> ExpertWeight:
        """Return the weight that the operations multiply by."""
        return self.weight


class GatedExperts(ExpertLinear):
    """Gate and up of every expert."""

    gated = True


class Experts(nn.Module):
    """The MLPs; `down(silu(gate(x)) * up(x))` each, or with another activation."""

    gate_up_proj: ExpertLinear | QuantizedLinear
    down_proj: ExpertLinear | QuantizedLinear

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        build: BuildContext,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        inner = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up_proj = GatedExperts(num_experts, hidden_size, inner, build, bias=bias)
        self.down_proj = ExpertLinear(
            num_experts, intermediate_size, {"": hidden_size}, build, bias=bias
        )


class SparseMLP(nn.Module):
    """hidden + the sum of the chosen experts' outputs, each times its router's weight."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        build: BuildContext,
        *,
        renormalize: bool,
        bias: bool = False,
        clamped: ClampedSwiGLU | None = None,
    ) -> None:
        """`renormalize`: the weights of a token's experts sum to 1; `bias`: router and experts have
        biases; `clamped`: in place of silu(gate) * up. Raises ConfigError."""
        super().__init__()
        if activation not in ("silu", "swish"):
            raise ConfigError(f"hidden_act: {activation!r} is not supported", param="hidden_act")
        if num_experts > MOST_EXPERTS:
            raise ConfigError(
                f"num_experts: {num_experts} is more than {MOST_EXPERTS}", param="num_experts"
            )
        if not 1 <= top_k <= num_experts:
            raise ConfigError(
                f"num_experts_per_tok: {top_k} of {num_experts} experts cannot be chosen",
                param="num_experts_per_tok",
            )
        asked = {"gate_up_bias": bias, "down_bias": bias, "activation": clamped is not None}
        _refuse_older(build.operations, [name for name, wanted in asked.items() if wanted])
        self.gate = Router(num_experts, hidden_size, build, bias=bias)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, build, bias=bias)
        self.clamped = clamped
        self.top_k = top_k
        self.renormalize = renormalize
        self.operations = build.operations

    def forward(self, hidden: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """hidden + mlp(norm(hidden)): [num_tokens, hidden_size] → the same shape; `hidden` may be
        overwritten."""
        x = norm(hidden)
        logits = self.operations.linear(x, self.gate.weight, self.gate.bias)
        routing = self.operations.route(logits, self.top_k, renormalize=self.renormalize)
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        more: dict[str, Any] = {
            "gate_up_bias": gate_up.bias, "down_bias": down.bias, "activation": self.clamped
        }  # fmt: skip
        more = {name: value for name, value in more.items() if value is not None}
        return self.operations.experts(x, routing, gate_up.bank, down.bank, residual=hidden, **more)


def _refuse_older(operations: Operations, wanted: list[str]) -> None:
    """Raise ConfigError if an override of `experts` lacks arguments that this layer needs."""
    taken = inspect.signature(operations.experts).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    if lacking := [name for name in wanted if name not in taken]:
        raise ConfigError(
            f"operations: {operations.name!r} cannot compute this model's experts: its method "
            f"`experts` takes no {', '.join(lacking)}",
            param="operations",
        )
