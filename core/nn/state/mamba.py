"""Mamba: a state-space layer whose state decays by a number per channel and state (arXiv
2312.00752)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ...parallel.ranks import ONE_RANK, Product
from ..context import BuildContext, ForwardContext
from ..linear import Linear
from .layer import CausalConv, StateMixer
from .operations import ScanWeights


class MambaSizes(NamedTuple):
    """Sizes of a layer."""

    hidden_size: int
    inner: int
    """Channels."""
    state_size: int
    rank: int
    """Channels that step sizes are computed from."""
    kernel: int
    """Inputs that the convolution sees."""


class MambaMixer(StateMixer):
    """Projection to inputs and gate; convolution; projection to step sizes, keys and queries;
    recurrence; projection. Takes the place of a block's attention."""

    def __init__(
        self,
        sizes: MambaSizes,
        build: BuildContext,
        *,
        bias: bool = False,
        conv_bias: bool = True,
        norms: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
        norm_names: tuple[str, ...] = (),
    ) -> None:
        """bias: of the first and the last projection; norms: of step sizes, keys and queries, none
        or all three; norm_names: of those that have weights, as modules."""
        super().__init__(
            conv=((sizes.kernel - 1, sizes.inner), build.dtype),
            ssm=((sizes.inner, sizes.state_size), torch.float32),
        )
        self.sizes, self.operations, self.ranks = sizes, build.operations, ONE_RANK
        self.in_proj = Linear(sizes.hidden_size, 2 * sizes.inner, build, bias=bias)
        self.conv1d = CausalConv(sizes.inner, sizes.kernel, build, bias=conv_bias)
        self.x_proj = Linear(sizes.inner, sizes.rank + 2 * sizes.state_size, build)
        self.dt_proj = Linear(sizes.rank, sizes.inner, build, bias=True)
        self.A_log = nn.Parameter(build.empty(sizes.inner, sizes.state_size))
        self.D = nn.Parameter(build.empty(sizes.inner))
        self.out_proj = Linear(sizes.inner, sizes.hidden_size, build, bias=bias)
        self._norms = norms
        for name, norm in zip(norm_names, norms, strict=False):
            self.add_module(name, norm)  # type: ignore[arg-type]
        self.weights: ScanWeights

    def after_loading(self) -> None:
        """Derive the recurrence's weights, in float32."""
        skip = self.D.detach().float()
        self.weights = ScanWeights(-self.A_log.detach().float().exp(), skip, torch.zeros_like(skip))

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        """As `StateMixer.mix`."""
        sizes, rows = self.sizes, context.layout.state_rows
        x, gate = self.in_proj(hidden, norm=norm).chunk(2, dim=-1)
        x = self.operations.causal_conv(
            x, self.conv1d.kernel, self.conv1d.bias, self.state("conv"), rows, silu=True
        )
        parts = self.x_proj(x).split([sizes.rank, sizes.state_size, sizes.state_size], dim=-1)
        if self._norms:
            parts = [norm(part) for norm, part in zip(self._norms, parts, strict=True)]
        steps, keys, queries = parts
        y = self.operations.selective_scan(
            x, self.dt_proj(steps), keys, queries, gate, self.weights, self.state("ssm"), rows
        )
        return self.out_proj, y
