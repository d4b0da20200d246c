"""Kimi delta attention: a gated delta net whose keys' channels decay each by its own number (Kimi
Linear, arXiv 2510.26692)."""

from __future__ import annotations

import torch
from torch import nn

from ...errors import ConfigError
from ...parallel.ranks import Product
from ...parallel.sharding import HeadShare, Sharding
from ..context import BuildContext, ForwardContext
from ..linear import Linear, MergedLinear
from .layer import GateNorm, MergedConv, StateMixer
from .operations import ChannelDeltaWeights

PARTS = ("q", "k", "v")


class KimiDeltaAttention(StateMixer):
    """Projections; convolution of queries, keys and values; delta rule; norm of each head, and a
    gate; projection. Takes the place of a block's attention. Ranks divide the heads.

    `down_proj` is the product of queries, keys and values; `gates_proj` that of decays (f), output
    gates (g) and betas (b), the first two of which may be narrow, with `f_b_proj` and `g_b_proj`
    behind them.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        kernel: int,
        build: BuildContext,
        *,
        eps: float,
        rank: int | None,
        bound: float | None = None,
    ) -> None:
        """kernel: inputs that the convolution sees; rank: width of narrow decays and gates; bound:
        least decay, of the bounded form. Raises ConfigError."""
        own = HeadShare.of(num_heads, num_heads, build.ranks.tensor)
        heads, rows, width = own.num_heads, own.rows(head_dim), num_heads * head_dim
        super().__init__(
            conv=((kernel - 1, 3 * heads * head_dim), build.dtype),
            delta=((heads, head_dim, head_dim), torch.float32),
        )
        if "gated_rms_norm.sigmoid" not in build.operations.features:
            raise ConfigError(
                f"operations: {build.operations.name!r} lacks gated_rms_norm.sigmoid, which this "
                "model needs",
                param="operations",
            )
        self.operations, self.ranks = build.operations, build.ranks
        self.heads = heads, head_dim
        self.eps, self.bound, self.rank = eps, bound, rank
        self.down_proj = MergedLinear(
            hidden_size, dict.fromkeys(PARTS, width), build, shard="out", shares=rows
        )
        self.conv1d = MergedConv(dict.fromkeys(PARTS, width), rows, kernel, build)
        share = rows["q"] if rank is None else slice(0, rank)
        self.gates_proj = MergedLinear(
            hidden_size, {"f": rank or width, "g": rank or width, "b": num_heads}, build,
            shard="out", shares={"f": share, "g": share, "b": own.queries},
        )  # fmt: skip
        if rank is not None:
            self.f_b_proj = Linear(rank, width, build, shard="out", share=rows["q"])
            self.g_b_proj = Linear(rank, width, build, shard="out", share=rows["q"])
        self.dt_bias = nn.Parameter(build.empty(heads * head_dim))
        self.A_log = nn.Parameter(build.empty(heads))
        self.shardings: dict[str, Sharding] = {}
        if build.ranks.tensor.size > 1:
            self.shardings = {
                "A_log": Sharding(0, {"": num_heads}, {"": (own.queries,)}),
                "dt_bias": Sharding(0, {"": width}, {"": (rows["q"],)}),
            }
        self.o_norm = GateNorm(head_dim, build)
        self.o_proj = Linear(width, hidden_size, build, shard="in", share=rows["q"])
        self.weights: ChannelDeltaWeights

    def after_loading(self) -> None:
        """Derive the recurrence's weights, in float32."""
        rate = -self.A_log.detach().float().exp()
        bias = self.dt_bias.detach().float().view(self.heads)
        self.weights = ChannelDeltaWeights(rate, bias, self.bound)

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        """As `StateMixer.mix`."""
        x, rows = hidden if norm is None else norm(hidden), context.layout.state_rows
        qkv = self.operations.causal_conv(
            self.down_proj(x), self.conv1d.kernel, None, self.state("conv"), rows, silu=True
        )
        gates: torch.Tensor = self.gates_proj(x)
        beta = gates[:, -self.heads[0] :]
        step, gate = gates[:, : -self.heads[0]].chunk(2, dim=-1)
        if self.rank is not None:
            step, gate = self.f_b_proj(step), self.g_b_proj(gate)
        query, key, value = (part.unflatten(-1, self.heads) for part in qkv.chunk(3, dim=-1))
        y = self.operations.channel_delta_rule(
            query, key, value, step.unflatten(-1, self.heads), beta, self.weights,
            self.state("delta"), rows,
        ).flatten(-2)  # fmt: skip
        y = self.operations.gated_rms_norm(
            y, gate, self.o_norm.weight, self.eps, group_size=self.heads[1], gate_first=False,
            sigmoid=True,
        )  # fmt: skip
        return self.o_proj, y
