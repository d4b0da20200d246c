"""Gated delta net: linear attention whose state is corrected by what it misses (arXiv
2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...parallel.ranks import ONE_RANK, Product
from ..context import BuildContext, ForwardContext
from ..linear import Linear, MergedLinear
from .layer import CausalConv, GateNorm, StateMixer
from .operations import DeltaWeights
from .sizes import DeltaSizes


class GatedDeltaNet(StateMixer):
    """Projection; convolution of queries, keys and values; delta rule; gated norm of each head;
    projection. Takes the place of a block's attention."""

    def __init__(
        self, sizes: DeltaSizes, build: BuildContext, *, eps: float, shards: Mapping[str, int]
    ) -> None:
        """shards: the tensors of the first projection in checkpoints → widths, in the order of
        `DeltaSizes.projection`, of which each has one or several"""
        convolved = sizes.projection[0]
        super().__init__(
            conv=((sizes.kernel - 1, convolved), build.dtype),
            delta=((sizes.num_value_heads, sizes.key_dim, sizes.value_dim), torch.float32),
        )
        self.sizes, self.operations, self.ranks = sizes, build.operations, ONE_RANK
        self.eps = eps
        self.in_proj = MergedLinear(sizes.hidden_size, shards, build, whole=len(shards) == 1)
        self.conv1d = CausalConv(convolved, sizes.kernel, build, bias=False)
        self.dt_bias = nn.Parameter(build.empty(sizes.num_value_heads))
        self.A_log = nn.Parameter(build.empty(sizes.num_value_heads))
        self.norm = GateNorm(sizes.value_dim, build)
        self.out_proj = Linear(sizes.values, sizes.hidden_size, build)
        self.weights: DeltaWeights

    def after_loading(self) -> None:
        """Derive the recurrence's weights, in float32."""
        rate = -self.A_log.detach().float().exp()
        self.weights = DeltaWeights(rate, self.dt_bias.detach().float())

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        """As `StateMixer.mix`."""
        y = self.operations.delta_net(
            self.in_proj(hidden, norm=norm), self.conv1d.kernel, self.weights, self.norm.weight,
            self.eps, self.sizes, self.state("conv"), self.state("delta"),
            context.layout.state_rows,
        )  # fmt: skip
        return self.out_proj, y
