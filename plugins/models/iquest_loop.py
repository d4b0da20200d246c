"""IQuest LoopCoder: Llama that runs several times over each token; after the first run, it averages
attention to the first run's keys and windowed attention.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.rotary import Rotary
from ...core.parallel.sharding import Sharding
from ...core.protocols.field_kinds import INTEGER, SIZE
from .blocks import Block, SelfAttention
from .decoder import CausalLM
from .looped import LoopedDecoder

Keys = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a step's tokens: [num_tokens, num_kv_heads, head_dim]"""


class LoopGate(nn.Module):
    """sigmoid(w · q + b) of each head's query; w: [num_heads, head_dim], b: [num_heads]"""

    def __init__(self, num_heads: int, head_dim: int, own: slice, build: BuildContext) -> None:
        super().__init__()
        sharding = Sharding(0, {"": num_heads}, {"": (own,)})
        self.shardings = {"weight": sharding, "bias": sharding}
        self.weight = nn.Parameter(build.empty(own.stop - own.start, head_dim))
        self.bias = nn.Parameter(build.empty(own.stop - own.start))

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        logits = (query.float() * self.weight.float()).sum(-1) + self.bias.float()
        return torch.sigmoid(logits)[..., None].to(query.dtype)


class LoopAttention(SelfAttention):
    attention: Any

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf, first, self.operations = config.hf_config, self.attention, build.operations
        local = msgspec.structs.replace(first.spec, sliding_window=int(hf.loop_window_size))
        others = (Attention(local, build) for _ in range(1, hf.loop_num))
        self.attention = nn.ModuleList([first, *others])
        self.gate = LoopGate(self.all_heads, self.head_dim, self.own.queries, build)

    def looped(
        self,
        hidden: torch.Tensor,
        norm: nn.Module,
        rotary: Rotary,
        context: ForwardContext,
        loop: int,
        kept: Keys | None,
    ) -> tuple[torch.Tensor, Keys]:
        """hidden + attention(norm(hidden)), and the keys and values for later loops. kept: the
        first loop's
        """
        first = self.attention[0]
        query, key, value = self.operations.heads(
            self.qkv_proj(hidden, norm=norm), first.layout, context.positions, rotary.cos_sin,
            None, None,
        )  # fmt: skip
        if kept is None:
            heads = first.attend(query, key, value, context)
            return self.project(heads, hidden), (key, value)
        shared = first.attend(query, *kept, context, cached=True).view(query.shape)
        local = self.attention[loop].attend(query, key, value, context).view(query.shape)
        mean = torch.lerp(local, shared, self.gate(query))
        return self.project(mean.flatten(1), hidden), kept


class LoopBlock(Block):
    self_attn: LoopAttention


class LoopDecoder(LoopedDecoder):
    block = LoopBlock
    loops_field = "loop_num"

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = self.embed(input_ids, context.positions)
        layers: Any = self.unlike_layers() if context.precompiling else self.stage_layers()
        kept: list[Keys | None] = [None] * len(layers)
        for loop in range(self.num_loops):
            for index, (layer, rotary) in enumerate(layers):
                hidden, kept[index] = layer.self_attn.looped(
                    hidden, layer.input_layernorm, rotary, context, loop, kept[index]
                )
                hidden = layer.mlp(hidden, layer.post_attention_layernorm)
        return hidden


class LoopWeightMap(WeightMap):
    def renamed(self, name: str) -> str:
        name = re.sub(r"\bgate_projections\.(\d+)\.", r"layers.\1.self_attn.gate.", name)
        return super().renamed(name)

    def source(self, parameter: str, shard: str | None = None) -> str:
        name = super().source(parameter, shard)
        return re.sub(r"layers\.(\d+)\.self_attn\.gate\.", r"gate_projections.\1.", name)


class IQuestLoopCoderForCausalLM(CausalLM):
    batch_invariant = False
    config_fields = {"loop_num": SIZE.not_null(), "loop_window_size": INTEGER.not_null()}
    attention = LoopAttention
    decoder = LoopDecoder
    weight_map: WeightMap = LoopWeightMap(
        stacked=CausalLM.weight_map.stacked, tied=CausalLM.weight_map.tied,
        prefixes=CausalLM.weight_map.prefixes,
    )  # fmt: skip
