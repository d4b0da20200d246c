"""Replaces `transformers`' products and experts by this engine's layers, for quantization and
tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ....core.errors import ConfigError
from ....core.nn.context import BuildContext
from ....core.nn.experts import Experts
from ....core.nn.linear import Linear
from ....core.nn.routing import Routing
from ....core.parallel.sharding import Features

FEATURES: dict[str, Features] = {"colwise": "out", "rowwise": "in"}
"""transformers' name of a sharding → the features that are sharded."""
WHOLE = frozenset({"colwise_gather_output", "rowwise_split_input"})
"""Products whose inputs and outputs all ranks hold; they are not sharded here."""
OF_EXPERTS = frozenset({"packed_colwise", "colwise", "rowwise", "moe_tp_experts"})
"""Shardings of experts; here ranks hold a part of each expert."""
ROUTERS = frozenset({"gate", "router"})
"""Last name parts of products that are never quantized: rounding would change the choice of
experts."""


class Projection(nn.Module):
    """Replaces `nn.Linear`: a product over the last dimension."""

    def __init__(self, linear: Linear, build: BuildContext, *, adds: bool) -> None:
        """`adds`: ranks shard its input features, and sum their results."""
        super().__init__()
        self.linear, self.ranks, self.adds = linear, build.ranks, adds
        self.out_features = linear.weight.shape[0]

    @property
    def weight(self) -> Any:
        """[out_features, in_features], for modules that read its dtype."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]"""
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, x.shape[-1])
        out = self.ranks.add(None, (self.linear, rows)) if self.adds else self.linear(rows)
        return out.view(*x.shape[:-1], -1)


class RoutedExperts(Experts):
    """The experts' MLPs, for a module that gets each token's experts and weights."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, build: BuildContext
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, build)
        self.operations, self.ranks = build.operations, build.ranks

    def forward(
        self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden: [num_tokens, hidden_size]; experts, weights: [num_tokens, top_k]"""
        if hidden.is_meta:
            return torch.empty_like(hidden)
        routing = Routing(weights.float().contiguous(), experts.to(torch.int32).contiguous())
        out = self.operations.experts(
            hidden.contiguous(), self.local(routing), self.gate_up_proj.expert_weight,
            self.down_proj.expert_weight, residual=torch.zeros_like(hidden),
        )  # fmt: skip
        return self.ranks.tensor.all_reduce(out)


class TensorPlan:
    """How ranks shard a model's modules, by its `transformers` configuration."""

    def __init__(self, config: Any, prefix: str, build: BuildContext) -> None:
        """`prefix`: of the base model's module names. Raises ConfigError without a plan, or if
        heads cannot be divided.
        """
        self.size = build.ranks.tensor.size
        plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        self.styles = {f"{prefix}.{name}": style for name, style in plan.items()}
        if self.size == 1:
            return
        if not plan:
            raise _undivided("transformers has no plan for it")
        for field in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, field, None) or self.size
            if heads % self.size:
                raise _undivided(f"{field} {heads} is no multiple of {self.size}")

    def style(self, name: str) -> str | None:
        """Return the plan's sharding of a module or parameter; None: not sharded."""
        if self.size == 1:
            return None
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = self.styles.get(pattern)
        whole = style is None or style in WHOLE or style.startswith("replicated")
        return None if whole else style


def place_modules(model: nn.Module, head: nn.Module | None, plan: TensorPlan,
                  build: BuildContext) -> tuple[set[str], set[str]]:  # fmt: skip
    """Replace products except the head's and routers', and experts of known arithmetic.

    → names of those products, names of those experts. Raises ConfigError if ranks cannot divide
    them.
    """
    products, experts = set(), set()
    for name, module in list(model.named_modules()):
        placed: nn.Module
        if _known_experts(module):
            placed = RoutedExperts(*_sizes(module), build)
            experts.add(name)
        elif isinstance(module, nn.Linear) and module is not head and _last(name) not in ROUTERS:
            style = plan.style(name)
            if style is not None and style not in FEATURES:
                raise _undivided(f"{name} would be divided as {style!r}")
            linear = Linear(
                module.in_features, module.out_features, build, bias=module.bias is not None,
                shard=None if style is None else FEATURES[style],
            )  # fmt: skip
            placed = Projection(linear, build, adds=style == "rowwise")
            products.add(name)
        else:
            continue
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, placed)
    _check_others(model, plan, products, experts)
    return products, experts


def _check_others(
    model: nn.Module, plan: TensorPlan, products: set[str], experts: set[str]
) -> None:
    for name in _names(model):
        style, owner = plan.style(name), name.rpartition(".")[0]
        if style is None or name in products:
            continue
        if not (style in OF_EXPERTS and (name in experts or owner in experts)):
            raise _undivided(f"{name} would be divided as {style!r}")


def _names(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_modules())
    yield from (name for name, _ in model.named_parameters())


def _undivided(reason: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size: this model runs on transformers' modules, and ranks cannot divide "
        f"it: {reason}",
        param="tensor_parallel_size",
    )


def _known_experts(module: nn.Module) -> bool:
    """Whether a module has gated silu MLPs in two tensors."""
    up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not all(isinstance(part, nn.Parameter) and part.dim() == 3 for part in (up, down)):
        return False
    served = {
        "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
        "has_post_expert_norm": False,
    }  # fmt: skip
    apply_gate: Any = getattr(module, "_apply_gate", None)
    if apply_gate is None or any(
        getattr(module, name, served[name]) != served[name] for name in served
    ):
        return False
    # Its arithmetic may be any: see what it does, also to large numbers, which some clamp.
    gate, up = torch.linspace(-60, 60, 64, device="cpu"), torch.linspace(50, -50, 64, device="cpu")
    got = apply_gate(torch.cat([gate, up])[None])[0]
    return got.shape == gate.shape and torch.allclose(got, F.silu(gate) * up, rtol=1e-4)


def _sizes(module: Any) -> tuple[int, int, int]:
    num_experts, hidden_size, inner = module.down_proj.shape
    return num_experts, hidden_size, inner


def _last(name: str) -> str:
    return name.rpartition(".")[2]
