"""Mamba 2: a state-space layer whose state decays by one number per head (arXiv 2405.21060)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ...parallel.ranks import ONE_RANK
from ..context import BuildContext, ForwardContext
from ..linear import Linear
from .layer import CausalConv, GateNorm, StateLayer
from .operations import ScanWeights


class Mamba2Sizes(NamedTuple):
    """Sizes of a layer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    """Groups of heads that share their keys and queries (B and C), and of channels that are normed
    together."""
    kernel: int
    """Inputs that the convolution sees."""

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Channels of the keys of all groups, and of the queries."""
        return self.num_groups * self.state_size


class Mamba2Mixer(StateLayer):
    """Projection to gate, inputs, keys, queries and step sizes; convolution; recurrence; gated
    norm; projection. Takes the place of a block's attention."""

    norm: GateNorm | None

    def __init__(
        self,
        sizes: Mamba2Sizes,
        build: BuildContext,
        *,
        eps: float,
        bias: bool = False,
        out_bias: bool = False,
        conv_bias: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        gate_first: bool = True,
        normed: bool = True,
    ) -> None:
        """bias: of the first projection; out_bias: of the last one; dt_limit: range of the step
        size; gate_first: the gate comes before the norm; normed: there is a norm."""
        channels = sizes.inner + 2 * sizes.keys
        super().__init__(
            conv=((sizes.kernel - 1, channels), build.dtype),
            ssm=((sizes.num_heads, sizes.head_dim, sizes.state_size), torch.float32),
        )
        self.sizes, self.operations, self.ranks = sizes, build.operations, ONE_RANK
        self.eps, self.gate_first, self.dt_limit = eps, gate_first, dt_limit
        self.in_proj = Linear(
            sizes.hidden_size, sizes.inner + channels + sizes.num_heads, build, bias=bias
        )
        self.conv1d = CausalConv(channels, sizes.kernel, build, bias=conv_bias)
        self.dt_bias = nn.Parameter(build.empty(sizes.num_heads))
        self.A_log = nn.Parameter(build.empty(sizes.num_heads))
        self.D = nn.Parameter(build.empty(sizes.num_heads))
        self.norm = GateNorm(sizes.inner, build) if normed else None
        self.out_proj = Linear(sizes.inner, sizes.hidden_size, build, bias=out_bias)
        self.weights: ScanWeights

    def after_loading(self) -> None:
        """Derive the recurrence's weights, in float32."""
        self.weights = ScanWeights(
            -self.A_log.detach().float().exp(), self.D.detach().float(),
            self.dt_bias.detach().float(), self.dt_limit,
        )  # fmt: skip

    def forward(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Any,
        context: ForwardContext,
        *,
        add: bool = True,
    ) -> torch.Tensor:
        """hidden + mixer(norm(hidden)), or with `add` False the second term alone: [num_tokens,
        hidden_size] → the same shape. `rotary` is not used."""
        inner = self.inner(self.in_proj(hidden, norm=norm), context)
        return self.ranks.add(hidden if add else None, (self.out_proj, inner))

    def inner(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, projection] → input of the last projection, [num_tokens, inner]"""
        sizes, rows = self.sizes, context.layout.state_rows
        channels = sizes.inner + 2 * sizes.keys
        gate, convolved, dt = projected.split([sizes.inner, channels, sizes.num_heads], dim=-1)
        convolved = self.operations.causal_conv(
            convolved, self.conv1d.kernel, self.conv1d.bias, self.state("conv"), rows, silu=True
        )
        x, keys, queries = convolved.split([sizes.inner, sizes.keys, sizes.keys], dim=-1)
        y = self.operations.ssd_scan(
            x.unflatten(-1, (sizes.num_heads, sizes.head_dim)),
            dt,
            keys.unflatten(-1, (sizes.num_groups, sizes.state_size)),
            queries.unflatten(-1, (sizes.num_groups, sizes.state_size)),
            self.weights,
            self.state("ssm"),
            rows,
        ).flatten(-2)
        if self.norm is None:
            return self.operations.silu_mul(torch.cat([gate, y], dim=-1))
        return self.operations.gated_rms_norm(
            y, gate, self.norm.weight, self.eps,
            group_size=sizes.inner // sizes.num_groups, gate_first=self.gate_first,
        )  # fmt: skip
