"""PLaMo 2: multi-head Mamba in every other layer, windowed attention in the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import OffsetRMSNorm, RMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.state.layer import CausalConv, StateMixer
from ...core.nn.state.operations import ScanWeights
from ...core.parallel.ranks import ONE_RANK, Product
from ...core.parallel.sharding import Sharding
from .blocks import BlockParts
from .decoder import CausalLM, Decoder
from .mixer import HybridBlock
from .parts import FusedAttention, HeadNormAttention

HEAD_EPS = 1e-6
"""Eps of the norms of queries and keys, instead of `rms_norm_eps`."""
OFFSETS = {
    "pre_mixer_norm": 1.0, "post_mixer_norm": 1 / 5,
    "pre_mlp_norm": 1.0, "post_mlp_norm": 1 / 5**1.5,
}  # fmt: skip
"""Offsets of the norms' weights."""


class Plamo2Mixer(StateMixer):
    """Mamba 2's recurrence; step sizes, keys and queries are computed from the convolution's
    output, and normed. Replaces a block's attention.
    """

    def __init__(self, hf: Any, build: BuildContext) -> None:
        heads, head_dim, states = hf.mamba_num_heads, hf.hidden_size_per_head, hf.mamba_d_state
        inner, rank = heads * head_dim, max(64, hf.hidden_size // 16)
        super().__init__(
            conv=((hf.mamba_d_conv - 1, inner), build.dtype),
            ssm=((heads, head_dim, states), torch.float32),
        )
        self.operations, self.ranks = build.operations, ONE_RANK
        self.heads, self.sizes = (heads, head_dim), [states, states, rank]
        self.in_proj = Linear(hf.hidden_size, 2 * inner, build)
        self.conv1d = CausalConv(inner, hf.mamba_d_conv, build, bias=False)
        self.bcdt_proj = Linear(inner, sum(self.sizes), build)
        eps = float(hf.rms_norm_eps)
        self.B_norm, self.C_norm = RMSNorm(states, eps, build), RMSNorm(states, eps, build)
        self.dt_norm = RMSNorm(rank, eps, build)
        self.dt_proj = Linear(rank, heads, build)
        self.dt_bias = nn.Parameter(build.empty(heads))
        self.A_log = nn.Parameter(build.empty(heads))
        self.D = nn.Parameter(build.empty(heads))
        self.out_proj = Linear(inner, hf.hidden_size, build)
        self.weights: ScanWeights

    def after_loading(self) -> None:
        self.weights = ScanWeights(
            -self.A_log.detach().float().exp(), self.D.detach().float(),
            self.dt_bias.detach().float(),
        )  # fmt: skip

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        rows = context.layout.state_rows
        gate, x = self.in_proj(hidden, norm=norm).chunk(2, dim=-1)
        x = self.operations.causal_conv(
            x, self.conv1d.kernel, None, self.state("conv"), rows, silu=True
        )
        keys, queries, steps = self.bcdt_proj(x).split(self.sizes, dim=-1)
        y = self.operations.ssd_scan(
            x.view(-1, *self.heads), self.dt_proj(self.dt_norm(steps)),
            self.B_norm(keys)[:, None], self.C_norm(queries)[:, None], self.weights,
            self.state("ssm"), rows,
        ).flatten(-2)  # fmt: skip
        y = self.operations.silu_mul(torch.cat([gate, y], dim=-1))
        return self.out_proj, y


class HeadsRMSNorm(nn.Module):
    """x / rms(x) * weight over each head, weight: [num_heads, head_dim]."""

    def __init__(self, num_heads: int, head_dim: int, own: slice, build: BuildContext) -> None:
        super().__init__()
        self.shardings = {"weight": Sharding(0, {"": num_heads}, {"": (own,)})}
        self.weight = nn.Parameter(build.empty(own.stop - own.start, head_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + HEAD_EPS)
        return (wide * self.weight.float()).to(x.dtype)


class Plamo2Attention(FusedAttention, HeadNormAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        size, own = config.head_dim, self.own
        self.q_layernorm = HeadsRMSNorm(config.num_heads, size, own.queries, build)
        self.k_layernorm = HeadsRMSNorm(config.num_kv_heads, size, own.keys, build)

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        """A token also sees the one `attention_window_size` before it."""
        if hf.attention_window_size is None or layer in (hf.full_attention_idx or ()):
            return None
        return int(hf.attention_window_size) + 1


class Plamo2Block(HybridBlock):
    norms = tuple(OFFSETS)
    state_name = "self_attn"
    mlp: GatedMLP

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        hf = parts.config.hf_config
        for name, offset in OFFSETS.items():
            norm = OffsetRMSNorm(hf.hidden_size, float(hf.rms_norm_eps), parts.build, offset=offset)
            setattr(self, name, norm)

    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        return OffsetRMSNorm(hf.hidden_size, float(hf.rms_norm_eps), build)

    @staticmethod
    def attends(hf: Any, layer: int) -> bool:
        half = hf.mamba_step // 2
        if not hf.mamba_enabled:
            return True
        if hf.num_hidden_layers <= half:
            return bool(layer == hf.num_hidden_layers - 1)
        return bool(layer % hf.mamba_step == half)

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        return Plamo2Mixer(parts.config.hf_config, parts.build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        norms = [getattr(self, name) for name in OFFSETS]
        pre_attn_norm, post_attn_norm, pre_mlp_norm, post_mlp_norm = norms
        mixed = self.mixer(hidden, pre_attn_norm, rotary, context, add=False)
        hidden = post_attn_norm.add(mixed, hidden)
        mlp_output = self.mlp(hidden, pre_mlp_norm, add=False)
        out: torch.Tensor = post_mlp_norm.add(mlp_output, hidden)
        return out


class Plamo2Decoder(Decoder):
    block = Plamo2Block


class Plamo2ForCausalLM(CausalLM):
    batch_invariant = False
    attention = Plamo2Attention
    decoder = Plamo2Decoder
    weight_map = WeightMap(
        tied=CausalLM.weight_map.tied,
        prefixes={"model.layers.layers.": "model.layers."},
        names={
            "self_attn": "mixer", "q_layernorm.weight": "q_weight",
            "k_layernorm.weight": "k_weight",
            **{f"{part}_norm.weight": f"{part}_norm_weight" for part in ("dt", "B", "C")},
        },
    )  # fmt: skip

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        """Gates and inputs are interleaved by head."""
        hf = config.hf_config
        return {"in_proj": RowOrder.by_part(hf.mamba_num_heads, 2, hf.hidden_size_per_head)}

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        return GatedMLP(hf.hidden_size, hf.intermediate_size, "silu", build, whole=True)
