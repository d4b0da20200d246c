"""HRM-Text: two stacks of layers that alternate over the same tokens, the lower one several times
per run of the higher one. Every run has its own keys and values.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import MergedLinear
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from .blocks import Block, BlockParts, SelfAttention
from .decoder import CausalLM, Decoder
from .parts import WeightlessRMSNorm


class HrmAttention(SelfAttention):
    """Outputs times the sigmoid of a gate, and a cache for each run of the layer."""

    fused: ClassVar[bool] = True
    attention: Any

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf, own = config.hf_config, self.own.rows(self.head_dim)
        self.operations, self.width = build.operations, self.num_heads * self.head_dim
        self.qkv_proj = MergedLinear(
            hf.hidden_size, dict.fromkeys("gqkv", self.all_heads * self.head_dim), build,
            shard="out", shares={"g": own["q"], **own}, whole=True,
        )  # fmt: skip
        count = hf.H_cycles * (hf.L_cycles if layer < hf.num_layers_per_stack else 1)
        spec = self.attention.spec
        self.attention = nn.ModuleList(Attention(spec, build) for _ in range(count))


class HrmBlock(Block):
    norm = WeightlessRMSNorm
    self_attn: HrmAttention

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary | None,
        context: ForwardContext,
        time: int = 0,
    ) -> torch.Tensor:
        attention = self.self_attn
        projected = attention.qkv_proj(hidden, norm=self.input_layernorm)
        gate, qkv = projected.tensor_split((attention.width,), dim=-1)
        heads = attention.attention[time](qkv.contiguous(), context, rotary=rotary)
        heads = attention.operations.sigmoid_gate(heads, gate)
        out: torch.Tensor = self.mlp(
            attention.project(heads, hidden), self.post_attention_layernorm
        )
        return out


class HrmDecoder(Decoder):
    """`layers`: the lower stack's, then the higher stack's."""

    block = HrmBlock

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        hf: Any = parts.config.hf_config
        self.size, self.high, self.low = hf.num_layers_per_stack, hf.H_cycles, hf.L_cycles
        self.z_L_init = nn.Parameter(parts.build.empty(hf.hidden_size))

    @staticmethod
    def num_blocks(hf: Any) -> int:
        """The layers of both stacks: `num_hidden_layers` counts caches."""
        return 2 * int(hf.num_layers_per_stack)

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float | None:
        return float(config.hf_config.embedding_scale)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        high = self.embed(input_ids, context.positions)
        if context.precompiling:
            for layer, rotary in self.unlike_layers():
                high = layer(high, rotary, context)
            return high
        low = self.z_L_init.expand_as(high)
        for turn in range(self.high):
            high = self.norm(high) if turn else high
            for again in range(self.low):
                low = self.norm(self.run(low + high, 0, turn * self.low + again, context))
            high = self.run(high + low, self.size, turn, context)
        return high

    def run(
        self, hidden: torch.Tensor, first: int, time: int, context: ForwardContext
    ) -> torch.Tensor:
        """Run the stack that begins at layer `first`."""
        for layer, rotary in self.stage_layers()[first : first + self.size]:
            hidden = layer(hidden, rotary, context, time)
        return hidden


@dataclasses.dataclass(frozen=True)
class HrmWeightMap(WeightMap):
    """Checkpoints number the layers per stack."""

    stack: int = 1

    def renamed(self, name: str) -> str:
        def number(at: re.Match[str]) -> str:
            return f"layers.{int(at[2]) + self.stack * (at[1] == 'H')}."

        return super().renamed(re.sub(r"\b([LH])_module\.layers\.(\d+)\.", number, name))

    def source(self, parameter: str, shard: str | None = None) -> str:
        def number(at: re.Match[str]) -> str:
            stack, layer = divmod(int(at[1]), self.stack)
            return f"{'LH'[stack]}_module.layers.{layer}."

        return re.sub(r"\blayers\.(\d+)\.", number, super().source(parameter, shard))


class HrmTextForCausalLM(CausalLM):
    attention = HrmAttention
    decoder = HrmDecoder
    weight_map: WeightMap = HrmWeightMap(
        tied=CausalLM.weight_map.tied,
        names={"self_attn": "attn", "qkv_proj": "gqkv_proj"},
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf: Any = config.hf_config
        if hf.prefix_lm:
            raise ConfigError(
                "prefix_lm: a prompt whose tokens attend to later ones is not supported; "
                "--hf-overrides '{\"prefix_lm\": false}' reads it from left to right, as "
                "transformers does where it gets no token_type_ids",
                param="prefix_lm",
            )
        for field in ("attention_bias", "mlp_bias"):
            if getattr(hf, field):
                raise ConfigError(f"{field}: only false is supported", param=field)
        for field in ("H_cycles", "L_cycles", "num_layers_per_stack"):
            if getattr(hf, field) < 1:
                raise ConfigError(f"{field}: {getattr(hf, field)} is less than 1", param=field)
        super().__init__(config, build)
        self.weight_map = dataclasses.replace(self.weight_map, stack=hf.num_layers_per_stack)  # type: ignore[call-arg]

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        return GatedMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build, whole=True)
