"""Zamba2: Mamba 2 in every layer, and before some a shared block of attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.activations import activation_named
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.state.layer import StateMixer
from ...core.nn.state.mamba2 import Mamba2Mixer
from ...core.nn.state.sizes import Mamba2Sizes
from ...core.protocols.attention import AttentionSpec
from .blocks import BlockParts
from .decoder import QKV_SHARDS, CausalLM, Decoder

GATED_NORM_EPS = 1e-5
SHARED = ("shared_transformer", "shared_transf")
"""Checkpoint names of shared blocks, of Zamba 2 and of Zamba."""


def adapters(
    uses: range, in_features: int, rank: int, out_features: int, build: BuildContext
) -> nn.ModuleDict:
    """Create a low-rank product for each use of a shared block."""
    return nn.ModuleDict({
        str(use): nn.Sequential(
            Linear(in_features, rank, build), Linear(rank, out_features, build)
        )
        for use in uses
    })  # fmt: skip


class SharedAttention(nn.Module):
    """Attention projections over the concatenated hidden states and embeddings."""

    def __init__(self, config: ModelConfig, uses: range, build: BuildContext) -> None:
        super().__init__()
        hf, size = config.hf_config, 2 * config.hidden_size
        sizes = {
            "q": config.num_heads * config.head_dim,
            "k": config.num_kv_heads * config.head_dim,
            "v": config.num_kv_heads * config.head_dim,
        }
        self.qkv_proj = MergedLinear(size, sizes, build)
        self.o_proj = Linear(sizes["q"], config.hidden_size, build)
        self.adapted = bool(getattr(hf, "use_shared_attention_adapter", False))
        if self.adapted:
            lists = [
                adapters(uses, size, hf.adapter_rank, width, build) for width in sizes.values()
            ]
            self.linear_q_adapter_list, self.linear_k_adapter_list, self.linear_v_adapter_list = (
                lists
            )

    def forward(
        self,
        x: torch.Tensor,
        use: str,
        attention: Attention,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """x: [num_tokens, 2 * hidden_size] → [num_tokens, hidden_size]"""
        qkv = self.qkv_proj(x)
        if self.adapted:
            lists = (
                self.linear_q_adapter_list, self.linear_k_adapter_list, self.linear_v_adapter_list
            )  # fmt: skip
            qkv = qkv + torch.cat([each[use](x) for each in lists], dim=-1)
        out: torch.Tensor = self.o_proj(attention(qkv, context, rotary=rotary))
        return out


class SharedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with an adapter of gate and up per use if `adapter_rank`
    is set.
    """

    def __init__(self, config: ModelConfig, uses: range, build: BuildContext) -> None:
        super().__init__()
        hf, bias = config.hf_config, bool(getattr(config.hf_config, "add_bias_linear", False))
        size, inner = config.hidden_size, hf.intermediate_size
        rank = getattr(hf, "adapter_rank", None)
        self.activation = activation_named(hf.hidden_act)
        self.gate_up_proj = MergedLinear(
            size, {"gate": inner, "up": inner}, build, bias=bias, whole=rank is not None
        )
        self.down_proj = Linear(inner, size, build, bias=bias)
        self.gate_up_proj_adapter_list: nn.ModuleDict | None = None
        if rank is not None:
            self.gate_up_proj_adapter_list = adapters(uses, size, rank, 2 * inner, build)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        both = self.gate_up_proj(x)
        if self.gate_up_proj_adapter_list is not None:
            both = both + self.gate_up_proj_adapter_list[use](x)
        gate, up = both.chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(self.activation(gate) * up)
        return out


class SharedBlock(nn.Module):
    """A block that several layers use, each with its own keys and values."""

    def __init__(self, config: ModelConfig, uses: range, build: BuildContext) -> None:
        super().__init__()
        eps = float(config.hf_config.rms_norm_eps)
        self.input_layernorm = RMSNorm(2 * config.hidden_size, eps, build)
        self.self_attn = SharedAttention(config, uses, build)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, eps, build)
        self.feed_forward = SharedMLP(config, uses, build)


class MambaLayer(nn.Module):
    """hidden + mamba(norm(hidden + more))"""

    def __init__(self, config: ModelConfig, mamba: StateMixer, build: BuildContext) -> None:
        super().__init__()
        eps = float(config.hf_config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, eps, build)
        self.mamba = mamba

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        rotary: Rotary | None,
        context: ForwardContext,
        more: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`embedded` and `rotary` are unused."""
        if more is None:
            out: torch.Tensor = self.mamba(hidden, self.input_layernorm, None, context)
            return out
        answer: torch.Tensor = self.mamba(
            hidden + more, self.input_layernorm, None, context, add=False
        )
        return hidden + answer


class HybridLayer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        use: int,
        shared: SharedBlock,
        mamba: MambaLayer,
        build: BuildContext,
    ) -> None:
        super().__init__()
        self.use = str(use)
        self.shared_transformer = shared
        self.linear = Linear(config.hidden_size, config.hidden_size, build)
        self.mamba_decoder = mamba
        spec = AttentionSpec(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            scale=(config.head_dim / 2) ** -0.5,
        )  # fmt: skip
        self.attention = Attention(spec, build)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """hidden, embedded: [num_tokens, hidden_size] → the same shape"""
        shared = self.shared_transformer
        x = shared.input_layernorm(torch.cat([hidden, embedded], dim=-1))
        x = shared.self_attn(x, self.use, self.attention, rotary, context)
        x = self.linear(shared.feed_forward(shared.pre_ff_layernorm(x), self.use))
        out: torch.Tensor = self.mamba_decoder(hidden, embedded, rotary, context, x)
        return out


def hybrid_layers(hf: Any) -> list[int]:
    """Return the layers after a shared block."""
    return [layer for layer, kind in enumerate(hf.layers_block_type) if kind == "hybrid"]


class Zamba2Decoder(Decoder):
    def __init__(self, parts: BlockParts) -> None:
        nn.Module.__init__(self)
        config, build = parts.config, parts.build
        hf = config.hf_config
        self.check(hf)
        self.embed_tokens = Embedding(config.vocab_size, hf.hidden_size, build)
        self.scale = None
        rotary = Rotary(config, build) if getattr(hf, "use_mem_rope", False) else None
        self.rotaries = nn.ModuleList([rotary] * config.num_layers)  # type: ignore[list-item]
        hybrid, num_blocks = hybrid_layers(hf), getattr(hf, "num_mem_blocks", 1)
        num_uses = len(hybrid)
        blocks = [
            SharedBlock(config, range(first, num_uses, num_blocks), build)
            for first in range(min(num_blocks, num_uses))
        ]
        layers: list[nn.Module] = []
        for layer in range(config.num_layers):
            mamba = MambaLayer(config, self.mixer(hf, build), build)
            if layer in hybrid:
                use = hybrid.index(layer)
                layers.append(HybridLayer(config, use, blocks[use % num_blocks], mamba, build))
            else:
                layers.append(mamba)
        self.layers = nn.ModuleList(layers)
        self.own_layers = range(config.num_layers)
        self.norm = RMSNorm(hf.hidden_size, float(hf.rms_norm_eps), build)

    @staticmethod
    def check(hf: Any) -> None:
        """Raise ConfigError for unsupported variants."""
        if hf.use_long_context:
            raise ConfigError("use_long_context: is not supported", param="use_long_context")

    @staticmethod
    def mixer(hf: Any, build: BuildContext) -> StateMixer:
        sizes = Mamba2Sizes(
            hf.hidden_size, hf.n_mamba_heads, hf.mamba_headdim, hf.mamba_d_state, hf.mamba_ngroups,
            hf.mamba_d_conv,
        )  # fmt: skip
        return Mamba2Mixer(
            sizes, build, eps=GATED_NORM_EPS, bias=hf.add_bias_linear,
            out_bias=hf.add_bias_linear, dt_limit=(float(hf.time_step_min), float("inf")),
        )  # fmt: skip

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = self.embed(input_ids, context.positions)
        embedded = hidden.clone()
        layers: Any = zip(self.layers, self.rotaries, strict=True)
        for layer, rotary in self.unlike_layers() if context.precompiling else layers:
            hidden = layer(hidden, embedded, rotary, context)
        return hidden


class Zamba2ForCausalLM(CausalLM):
    tensor_parallel = False
    decoder: ClassVar[type[Decoder]] = Zamba2Decoder
    weight_map: WeightMap = WeightMap(
        stacked=QKV_SHARDS,
        tied=CausalLM.weight_map.tied,
        names={"model.norm": "model.final_layernorm"},
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        hf = config.hf_config
        # Checkpoints may repeat the tensors that layers share.
        repeated = hybrid_layers(hf)[getattr(hf, "num_mem_blocks", 1) :]
        ignored = tuple(f"model.layers.{layer}.{part}." for layer in repeated for part in SHARED)
        self.weight_map = replace(self.weight_map, ignored=ignored)
