"""Lightning attention: linear attention whose state decays by a constant of each head (arXiv
2405.17381; MiniMax-01, arXiv 2501.08313)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.ranks import Product
from ...parallel.sharding import HeadShare
from ..context import BuildContext, ForwardContext
from ..linear import Linear, MergedLinear
from ..norm import AllHeadsRMSNorm
from .layer import StateMixer
from .operations import ScanWeights


class LightningAttention(StateMixer):
    """Projection to queries, keys and values, each followed by silu; S = exp(-slope) S + k vᵀ,
    y = Sᵀ q; norm over all heads; gate; projection. Takes the place of a block's attention.

    That is Mamba 2's recurrence with steps of 1, each head its own group, and no input in the
    output. Ranks divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        slopes: tuple[float, ...],
        head_dim: int,
        build: BuildContext,
        *,
        eps: float,
    ) -> None:
        """slopes: of each head of all ranks; eps: of the norm"""
        heads = len(slopes)
        own = HeadShare.of(heads, heads, build.ranks.tensor)
        self.num_heads, self.head_dim = own.num_heads, head_dim
        super().__init__(ssm=((own.num_heads, head_dim, head_dim), torch.float32))
        self.ranks, self.operations = build.ranks, build.operations
        self.slopes = slopes[own.queries]
        rows, width = own.rows(head_dim), heads * head_dim
        self.qkv_proj = MergedLinear(
            hidden_size, dict.fromkeys(rows, width), build, shard="out", shares=rows, whole=True
        )
        self.output_gate = Linear(hidden_size, width, build, shard="out", share=rows["q"])
        self.norm = AllHeadsRMSNorm(own.queries, heads, head_dim, eps, build)
        self.out_proj = Linear(width, hidden_size, build, shard="in", share=rows["q"])
        self.weights: ScanWeights
        self.steps: torch.Tensor
        """[1, num_heads]"""

    def after_loading(self) -> None:
        """Create the recurrence's constants, in float32."""
        device = self.norm.weight.device
        slopes = torch.tensor(self.slopes, dtype=torch.float32, device=device)
        zeros = torch.zeros_like(slopes)
        self.weights = ScanWeights(-slopes, zeros, zeros, dt_limit=(1.0, 1.0))
        self.steps = zeros[None]

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        """As `StateMixer.mix`."""
        x = hidden if norm is None else norm(hidden)
        shape = (3, self.num_heads, self.head_dim)
        query, key, value = F.silu(self.qkv_proj(x)).unflatten(-1, shape).unbind(1)
        y = self.operations.ssd_scan(
            value, self.steps.expand(len(x), -1), key, query, self.weights, self.state("ssm"),
            context.layout.state_rows,
        ).flatten(-2)  # fmt: skip
        y = self.operations.sigmoid_gate(self.norm(y), self.output_gate(x))
        return self.out_proj, y
