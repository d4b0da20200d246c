"""A.X K2: an indexer beside latent attention with gated outputs, and gated norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.protocols.field_kinds import SIZE
from ...core.protocols.latent_attention import ChosenTokens
from .blocks import BlockParts
from .deepseek import DeepseekV32ForCausalLM
from .deepseek_moe import is_dense
from .indexed import IndexedBlock, IndexedDecoder, IndexedSelfAttention


class GatedRMSNorm(nn.Module):
    """y * sigmoid(W_up silu(W_down y)) of y = x / rms(x) * weight."""

    def __init__(self, size: int, rank: int, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.operations = build.operations
        self.norm = RMSNorm(size, eps, build)
        self.W_down = Linear(size, rank, build)
        self.W_up = Linear(rank, size, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return self.operations.sigmoid_gate(normed, self.W_up(F.silu(self.W_down(normed))))


class AXK2Attention(IndexedSelfAttention):
    """One product of the narrow vector, normed and not, makes queries and the output channels'
    gates.
    """

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf, self.operations = config.hf_config, build.operations
        self.key_dim = hf.qk_nope_head_dim + hf.qk_rope_head_dim
        self.value_dim = hf.v_head_dim
        size, own = self.key_dim + self.value_dim, self.own.queries
        self.q_b_proj = Linear(
            2 * hf.q_lora_rank, config.num_heads * size, build, shard="out",
            share=slice(own.start * size, own.stop * size),
        )  # fmt: skip

    def attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rotary: Rotary | None,
        context: ForwardContext,
        chosen: ChosenTokens | None = None,
    ) -> torch.Tensor:
        both = torch.cat([self.q_a_layernorm(query), query], dim=-1)
        heads = self.q_b_proj(both).unflatten(1, (self.num_heads, -1))
        own, gate = heads.split_with_sizes([self.key_dim, self.value_dim], dim=-1)
        out: torch.Tensor = self.latent_attention(
            own.flatten(1), latent, self.up, context, norm=self.kv_a_layernorm, rotary=rotary,
            chosen=chosen,
        )  # fmt: skip
        return self.operations.sigmoid_gate(out, gate.flatten(1))


class AXK2Block(IndexedBlock):
    """All norms are gated except the one before a plain MLP."""

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        hf = parts.config.hf_config
        dense = is_dense(hf, layer)
        for name in self.norms[:1] if dense else self.norms:
            eps = float(hf.rms_norm_eps)
            setattr(self, name, GatedRMSNorm(hf.hidden_size, hf.gated_norm_rank, eps, parts.build))


class AXK2Decoder(IndexedDecoder):
    block = AXK2Block


class AXK2ForCausalLM(DeepseekV32ForCausalLM):
    config_fields = {"gated_norm_rank": SIZE}
    attention = AXK2Attention
    decoder = AXK2Decoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf: Any = config.hf_config
        if (hf.n_group or 1) > 1:
            raise ConfigError(
                f"n_group: experts in {hf.n_group} groups, of which A.X K2 counts those left out "
                "as 0 and not as the worst, are not supported",
                param="n_group",
            )
        super().__init__(config, build)
