"""Short convolution: gated inputs, convolved over the last few tokens (LFM2, arXiv 2511.23404)."""

from __future__ import annotations

import torch
from torch import nn

from ...parallel.ranks import ONE_RANK, Product
from ..context import BuildContext, ForwardContext
from ..linear import Linear
from .layer import CausalConv, StateMixer


class ShortConv(StateMixer):
    """out(c * conv(b * x)), with b, c and x of one projection. Takes the place of a block's
    attention."""

    def __init__(self, hidden_size: int, kernel: int, build: BuildContext, *, bias: bool) -> None:
        """kernel: inputs that the convolution sees; bias: of all three parts"""
        super().__init__(conv=((kernel - 1, hidden_size), build.dtype))
        self.operations, self.ranks = build.operations, ONE_RANK
        self.in_proj = Linear(hidden_size, 3 * hidden_size, build, bias=bias)
        self.conv = CausalConv(hidden_size, kernel, build, bias=bias)
        self.o_proj = Linear(hidden_size, hidden_size, build, bias=bias)

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        """As `StateMixer.mix`."""
        b, c, x = self.in_proj(hidden, norm=norm).chunk(3, dim=-1)
        convolved = self.operations.causal_conv(
            b * x, self.conv.kernel, self.conv.bias, self.state("conv"),
            context.layout.state_rows, silu=False,
        )  # fmt: skip
        return self.o_proj, c * convolved
