"""Short convolution: gated inputs, convolved over the last few tokens (LFM2, arXiv 2511.23404)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...parallel.ranks import ONE_RANK
from ..context import BuildContext, ForwardContext
from ..linear import Linear
from .layer import CausalConv, StateLayer


class ShortConv(StateLayer):
    """out(c * conv(b * x)), with b, c and x of one projection. Takes the place of a block's
    attention."""

    def __init__(self, hidden_size: int, kernel: int, build: BuildContext, *, bias: bool) -> None:
        """kernel: inputs that the convolution sees; bias: of all three parts"""
        super().__init__(conv=((kernel - 1, hidden_size), build.dtype))
        self.operations, self.ranks = build.operations, ONE_RANK
        self.in_proj = Linear(hidden_size, 3 * hidden_size, build, bias=bias)
        self.conv = CausalConv(hidden_size, kernel, build, bias=bias)
        self.o_proj = Linear(hidden_size, hidden_size, build, bias=bias)

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
        b, c, x = self.in_proj(hidden, norm=norm).chunk(3, dim=-1)
        convolved = self.operations.causal_conv(
            b * x, self.conv.kernel, self.conv.bias, self.state("conv"),
            context.layout.state_rows, silu=False,
        )  # fmt: skip
        return self.ranks.add(hidden if add else None, (self.o_proj, c * convolved))
