"""Mamba 2: a state-space layer whose state decays by one number per head (arXiv 2405.21060)."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ...parallel.ranks import ONE_RANK, Product
from ..context import BuildContext, ForwardContext
from ..linear import Linear
from ..norm import RMSNorm, ScaledRMSNorm
from .layer import CausalConv, StateMixer
from .operations import ConvWeights, GatedNorm, Mamba2Factors, ScanWeights
from .sizes import Mamba2Sizes


class Mamba2Mixer(StateMixer):
    """Projection to gate, inputs, keys, queries and step sizes; convolution; recurrence; gated
    norm; projection. Takes the place of a block's attention."""

    norm: RMSNorm | None

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
        factors: Mamba2Factors | None = None,
        input_factors: tuple[float, float, float] | None = None,
    ) -> None:
        """bias: of the first projection; out_bias: of the last one; dt_limit: range of the step
        size; gate_first: the gate comes before the norm; normed: there is a norm; factors:
        see there; input_factors: of the convolution's inputs, of its keys and of its queries"""
        _, channels, _ = sizes.projection
        super().__init__(
            conv=((sizes.kernel - 1, channels), build.dtype),
            ssm=((sizes.num_heads, sizes.head_dim, sizes.state_size), torch.float32),
        )
        self.sizes, self.operations, self.ranks = sizes, build.operations, ONE_RANK
        self.gate_first, self.dt_limit = gate_first, dt_limit
        self.in_proj = Linear(sizes.hidden_size, sum(sizes.projection), build, bias=bias)
        self.conv1d = CausalConv(channels, sizes.kernel, build, bias=conv_bias)
        self.dt_bias = nn.Parameter(build.empty(sizes.num_heads))
        self.A_log = nn.Parameter(build.empty(sizes.num_heads))
        self.D = nn.Parameter(build.empty(sizes.num_heads))
        self.factors, self.input_factors = factors, input_factors
        self.norm = None
        if normed:
            self.norm = (
                RMSNorm(sizes.inner, eps, build)
                if factors is None
                else ScaledRMSNorm(sizes.inner, eps, build, factor=factors.out)
            )
        self.out_proj = Linear(sizes.inner, sizes.hidden_size, build, bias=out_bias)
        self.weights: ScanWeights
        self.conv: ConvWeights

    def after_loading(self) -> None:
        """Derive the recurrence's weights, in float32, and the convolution's."""
        self.weights = ScanWeights(
            -self.A_log.detach().float().exp(), self.D.detach().float(),
            self.dt_bias.detach().float(), self.dt_limit,
        )  # fmt: skip
        kernel = self.conv1d.kernel
        if self.input_factors is not None:
            # Contiguous and in float32, so that nothing is rounded twice.
            parts = kernel.detach().float().split(self.sizes.convolved)
            kernel = torch.cat([p * f for p, f in zip(parts, self.input_factors, strict=True)])
        self.conv = ConvWeights(kernel, self.conv1d.bias)

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        """As `StateMixer.mix`."""
        y, remaining = self.inner(self.in_proj(hidden, norm=norm), context)
        product = partial(self.out_proj, norm=remaining)
        return product, y

    def inner(
        self, projected: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, RMSNorm | None]:
        """[num_tokens, projection] → input of the last projection, [num_tokens, inner], and the
        norm that this projection has to apply to it, if any"""
        sizes, rows, norm, factors = self.sizes, context.layout.state_rows, self.norm, self.factors
        # One norm of all channels behind the gate is the projection's: with one token in its pass
        # over the weight. Of more than a few it is computed together with the gate.
        passed = self.gate_first and sizes.num_groups == 1 and rows.few
        if factors is not None and norm is not None:
            factors = factors._replace(out=1.0)  # The norm has it.
        own = None
        if norm is not None and not passed:
            own = GatedNorm(norm.norm.weight, norm.eps, self.gate_first)
        y = self.operations.mamba2(
            projected, self.conv, self.weights, sizes, self.state("conv"), self.state("ssm"), rows,
            norm=own, factors=factors,
        )  # fmt: skip
        return y, norm if own is None else None
