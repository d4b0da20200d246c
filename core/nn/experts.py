"""Mixture of experts: many MLPs, of which a router chooses a few for each token."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..parallel.expert_exchange import ExpertExchange
from ..parallel.expert_share import ExpertShare
from ..parallel.sharding import Features
from .activations import ClampedSwiGLU, ExpertActivation, LimitedSwiGLU
from .context import BuildContext
from .expert_balance.places import ExpertBalance
from .layer_operations.experts import ExpertWeight
from .linear import Linear, MergedLinear
from .mlp import GatedMLP, PlainMLP
from .norm import before_product
from .operations import Operations
from .quantized import QuantizedLinear
from .routing import Routing, RoutingRule

MOST_EXPERTS = 1 << 14
"""Sanity bound: layers of published models have less than a tenth of it."""


GELU = "gelu_pytorch_tanh"
"""What configurations call gelu by its tanh approximation."""


class Router(nn.Module):
    """weight: [num_experts, hidden_size], bias: [num_experts]. Never quantized: it is small, and
    rounding would change the choice of experts.

    `score_bias`: e_score_correction_bias, [num_experts] float32, is the rule's `bias`. `wide`:
    logits are computed in float32.
    """

    e_score_correction_bias: nn.Parameter | None
    weight_is_all: bool = True
    """Whether an operation that reads the weight computes what `forward` does."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        build: BuildContext,
        *,
        bias: bool = False,
        score_bias: bool = False,
        wide: bool = False,
    ) -> None:
        super().__init__()
        float32 = dataclasses.replace(build, dtype=torch.float32)
        self.operations, self.wide = build.operations, wide
        self.weight = nn.Parameter((float32 if wide else build).empty(num_experts, hidden_size))
        self.bias = nn.Parameter(build.empty(num_experts)) if bias else None
        self.e_score_correction_bias = (
            nn.Parameter(float32.empty(num_experts)) if score_bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → logits [num_tokens, num_experts]"""
        x = x.float() if self.wide else x
        return self.operations.linear(x, self.weight, self.bias)


class ExpertLinear(MergedLinear):
    """One linear layer of all experts, as one weight: [num_experts * out_features, in_features].

    It has one shard per expert, in order: "3" is the fourth expert's; if several layers are merged,
    one per expert and layer, such as "3.gate". To a quantization method it is a merged layer with
    the role "experts".
    """

    weight: nn.Parameter
    expert_share: ExpertShare | None
    """The experts that this rank holds, whole; None: all, or a part of each."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        sizes: dict[str, int],
        build: BuildContext,
        *,
        bias: bool = False,
        shard: Features | None = None,
        share: slice | None = None,
    ) -> None:
        """`share`: this rank's features of each expert, of those that ranks divide, unless ranks
        hold experts whole."""
        experts = build.expert_share(num_experts)
        shards = {
            f"{expert}.{name}" if name else str(expert): size
            for expert in (range(num_experts) if experts is None else experts.own)
            for name, size in sizes.items()
        }
        if experts is not None:
            shard = share = None
        names = ("",) if shard == "in" else shards
        shares = None if share is None else dict.fromkeys(names, share)
        super().__init__(in_features, shards, build, bias=bias, shard=shard, shares=shares)
        self.expert_share = experts

    @property
    def expert_weight(self) -> ExpertWeight:
        """Return the weight that the operations multiply by."""
        return self.weight


class GatedExperts(ExpertLinear):
    """Gate and up of every expert."""

    gated = True


class Experts(nn.Module):
    """The MLPs; `down(silu(gate(x)) * up(x))` each, or with another activation; without gates,
    `down(activation(up(x)))`."""

    gate_up_proj: ExpertLinear | QuantizedLinear
    up_proj: ExpertLinear | QuantizedLinear
    down_proj: ExpertLinear | QuantizedLinear

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        build: BuildContext,
        *,
        bias: bool = False,
        gated: bool = True,
    ) -> None:
        super().__init__()
        inner = {"gate": intermediate_size, "up": intermediate_size}
        self.share = build.expert_share(num_experts)
        own = None if self.share is not None else build.inner_share(intermediate_size)
        self.balance: ExpertBalance | None = None
        """Where the experts are by now; None: where they were loaded."""
        self.exchange: ExpertExchange | None = None
        """How tokens come to the ranks of their experts; None: this rank has all tokens."""
        self.chosen: torch.Tensor | None = None
        """[most tokens, top_k] Where the experts of a step's tokens are noted, if they are read."""
        if self.share is not None:
            check_features(build.operations, frozenset({"experts.foreign"}))
            if build.ranks.all2all is not None:
                self.exchange = ExpertExchange(build.ranks.all2all, self.share, build.ranks.round)
            if build.redundant_experts is not None:
                self.balance = ExpertBalance(
                    self.share, build.redundant_experts, build.ranks.experts, build.device
                )
        self.gated = gated
        if gated:
            self.gate_up_proj = GatedExperts(
                num_experts, hidden_size, inner, build, bias=bias, shard="out", share=own
            )
        else:
            self.up_proj = ExpertLinear(
                num_experts, hidden_size, {"": intermediate_size}, build, bias=bias, shard="out",
                share=own,
            )  # fmt: skip
        self.down_proj = ExpertLinear(
            num_experts, intermediate_size, {"": hidden_size}, build, bias=bias, shard="in",
            share=own,
        )  # fmt: skip

    @property
    def first(self) -> ExpertLinear | QuantizedLinear:
        """The layers before the activation."""
        return self.gate_up_proj if self.gated else self.up_proj

    @property
    def first_number(self) -> int:
        """Number of this rank's first expert, if nothing else asks for the numbers of all ranks."""
        if self.share is None or self.balance is not None or self.chosen is not None:
            return 0
        return self.share.first

    def local(self, routing: Routing, first: int = 0) -> Routing:
        """Number a routing's experts as this rank holds them. first: the expert from which they are
        counted."""
        if self.chosen is not None:
            # A recorded step may have more tokens than a step, as padding.
            count = min(len(routing.experts), len(self.chosen))
            self.chosen[:count].copy_(routing.experts[:count])
        if self.share is None:
            return routing
        if self.balance is not None:
            return self.balance.place(routing)
        start, num_experts = self.share.first - first, self.share.num_experts
        experts = routing.experts - start if start else routing.experts
        return routing._replace(experts=experts, num_experts=num_experts)


class SparseMLP(nn.Module):
    """hidden + the sum of the chosen experts' outputs, each times its router's weight, + the output
    of experts that all tokens share."""

    shared_expert_gate: Router | None
    shared_experts: GatedMLP | PlainMLP | None

    def __init__(
        self,
        num_experts: int,
        rule: RoutingRule,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        build: BuildContext,
        *,
        bias: bool = False,
        score_bias: bool = False,
        wide_router: bool = False,
        clamped: ClampedSwiGLU | LimitedSwiGLU | None = None,
        shared: GatedMLP | PlainMLP | None = None,
        shared_gate: bool = False,
        gated: bool = True,
        latent_size: int | None = None,
    ) -> None:
        """`rule`: without its bias, which the router has with `score_bias`; `bias`: router and
        experts have biases; `wide_router`: its logits are computed in float32; `clamped`: in place
        of silu(gate) * up; `shared`: experts for all tokens, as one MLP, with `shared_gate` times
        the sigmoid of a logit per token; `gated`: whether experts have gates; `latent_size`: width
        that tokens are projected to for the chosen experts, and back behind them. Raises
        ConfigError."""
        super().__init__()
        if activation not in (("silu", "swish", GELU) if gated else ("relu2",)):
            raise ConfigError(f"hidden_act: {activation!r} is not supported", param="hidden_act")
        if num_experts > MOST_EXPERTS:
            raise ConfigError(
                f"num_experts: {num_experts} is more than {MOST_EXPERTS}", param="num_experts"
            )
        _check_groups(num_experts, rule)
        in_reach = num_experts // rule.groups * rule.top_groups
        if not 1 <= rule.top_k <= in_reach:
            raise ConfigError(
                f"num_experts_per_tok: {rule.top_k} of {in_reach} experts cannot be chosen",
                param="num_experts_per_tok",
            )
        needs = {
            "experts.bias": bias, "route.bias": score_bias,
            "experts.activation": isinstance(clamped, ClampedSwiGLU),
            "experts.limit": isinstance(clamped, LimitedSwiGLU),
            "experts.gelu": activation == GELU, "experts.relu2": not gated,
        }  # fmt: skip
        check_features(build.operations, rule.features | {name for name in needs if needs[name]})
        self.gate = Router(
            num_experts, hidden_size, build, bias=bias, score_bias=score_bias, wide=wide_router
        )
        width = hidden_size if latent_size is None else latent_size
        self.experts = Experts(num_experts, width, intermediate_size, build, bias=bias, gated=gated)
        self._width, self._dtype = width, build.dtype
        self.latent = latent_size is not None
        if self.latent:
            self.fc1_latent_proj = Linear(hidden_size, width, build)
            self.fc2_latent_proj = Linear(width, hidden_size, build)
        self.shared_experts = shared
        self.shared_expert_gate = Router(1, hidden_size, build) if shared_gate else None
        self.activation: ExpertActivation | None = clamped
        if not gated or activation == GELU:
            self.activation = "gelu" if gated else "relu2"
        self.rule = rule
        self.num_choices = num_experts
        """Experts that a token may choose, those that compute nothing included."""
        self.operations, self.ranks = build.operations, build.ranks

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module | None, *, add: bool = True
    ) -> torch.Tensor:
        """hidden + mlp(norm(hidden)), or with `add` False the second term alone: [num_tokens,
        hidden_size] → the same shape; `hidden` may be overwritten."""
        x, logits = self._normed(hidden, norm)
        routed = self._routed
        if logits is not None:
            routed = functools.partial(self._routed, logits=logits)
        residual = hidden if add else None
        if self.shared_experts is None:
            return self.ranks.add(residual, (routed, x))
        inner = self.shared_experts.inner(x)
        if self.shared_expert_gate is not None:
            # Before the product: it is linear, and so adds to the residual as any other.
            gate = self.shared_expert_gate
            if gate.weight_is_all:
                inner = self.operations.sigmoid_gate(inner, x, gate.weight)
            else:
                inner = inner * torch.sigmoid(gate(x)).to(inner.dtype)
        return self.ranks.add(residual, (routed, x), (self.shared_experts.down_proj, inner))

    def _normed(
        self, hidden: torch.Tensor, norm: nn.Module | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return norm(hidden), and the router's logits of it where one operation makes both."""
        x, fused = before_product(hidden, norm)
        if norm is None or fused is None:
            return x, None
        gate = self.gate
        if type(self).choose is not SparseMLP.choose or not gate.weight_is_all:
            return norm(hidden), None
        return self.operations.normed_linear(x, fused, gate.weight, gate.bias)

    def _routed(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`logits`: None: nothing has computed them."""
        computed = self.computed(self.inputs(x), self._local_choice(x, logits), residual)
        if not self.latent:
            return computed
        # Linear: of several ranks, each may project its part of the sum.
        out: torch.Tensor = self.fc2_latent_proj(computed, residual=residual)
        return out

    def computed(
        self, x: torch.Tensor, routing: Routing, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what the experts compute for the inputs; without a latent, plus the residual."""
        first, down = self.experts.first, self.experts.down_proj
        more: dict[str, Any] = {
            "gate_up_bias": first.bias, "down_bias": down.bias, "activation": self.activation
        }  # fmt: skip
        more = {name: value for name, value in more.items() if value is not None}

        def compute(
            x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, into: Any = None
        ) -> torch.Tensor:
            chosen = routing._replace(experts=experts, weights=weights)
            if into is None and "experts.no_residual" not in self.operations.features:
                into = torch.zeros_like(x)
            return self.operations.experts(
                x, chosen, first.expert_weight, down.expert_weight, residual=into, **more
            )

        into = None if self.latent else residual
        exchange = None if self.ranks.paused else self.experts.exchange
        if exchange is None:
            return compute(x, routing.experts, routing.weights, into)
        computed = exchange.run(x, routing.experts, routing.weights, compute)
        return computed if into is None else into.add_(computed)

    def compute_for_others(self) -> None:
        """Take part in the exchange of a layer for which this engine has no tokens."""
        weight, top_k = self.gate.weight, self.rule.top_k
        weights = weight.new_empty(0, top_k, dtype=torch.float32)
        x = weight.new_empty(0, self._width, dtype=self._dtype)
        self.computed(x, self.experts.local(Routing(weights, weights.int())), None)

    def _local_choice(self, x: torch.Tensor, logits: torch.Tensor | None = None) -> Routing:
        """Choose each token's experts, with their numbers on this rank: by the router's own launch,
        unless a family does more with them. `logits`: as of `_routed`."""
        first, kind = self.experts.first_number, type(self)
        own = kind.choose is not SparseMLP.choose or kind.route is not SparseMLP.route
        if not first or own or "route.first" not in self.operations.features:
            routing = self.choose(x) if logits is None else self.route(logits)
            return self.experts.local(routing)
        logits = self.gate(x) if logits is None else logits
        return self.experts.local(self.operations.route(logits, self._rule(first)), first)

    def choose(self, x: torch.Tensor) -> Routing:
        """Choose each token's experts: [num_tokens, hidden_size] → what each token gets."""
        return self.route(self.gate(x))

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the chosen experts compute from: [num_tokens, hidden_size] → [num_tokens,
        hidden_size, or the latent's]."""
        out: torch.Tensor = self.fc1_latent_proj(x) if self.latent else x
        return out

    def route(self, logits: torch.Tensor) -> Routing:
        """Choose experts by the rule: [num_tokens, num_experts] → what each token gets. Families
        whose routers have a rule of their own override it."""
        return self.operations.route(logits, self._rule())

    def _rule(self, first: int = 0) -> RoutingRule:
        return self.rule._replace(bias=self.gate.e_score_correction_bias, first=first)


def _check_groups(num_experts: int, rule: RoutingRule) -> None:
    """Raise ConfigError, with the field's name, for impossible groups."""
    if rule.groups < 1 or num_experts % rule.groups:
        raise ConfigError(
            f"n_group: {num_experts} experts cannot be in {rule.groups} equal groups",
            param="n_group",
        )
    if not 1 <= rule.top_groups <= rule.groups:
        raise ConfigError(
            f"topk_group: {rule.top_groups} of {rule.groups} groups cannot be chosen",
            param="topk_group",
        )


def check_features(operations: Operations, needed: frozenset[str]) -> None:
    """Raise ConfigError if the operations lack options that this layer needs."""
    if lacking := needed - operations.features:
        raise ConfigError(
            f"operations: {operations.name!r} cannot compute this model's experts: it lacks "
            f"{', '.join(sorted(lacking))}",
            param="operations",
        )
