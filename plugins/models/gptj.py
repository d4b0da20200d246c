"""GPT-J and CodeGen: attention and MLP side by side over one norm, pairs of neighbours rotated
in a part of each head, a head with a bias. CodeGen has queries, values and keys in four groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.nn.context import BuildContext
from ...core.nn.rotary import Rotary
from ...core.protocols.field_kinds import INTEGER
from .decoder import QKV_SHARDS, CausalLM
from .parts import FusedAttention, OldWeightMap, ParallelLayerNormDecoder, plain_mlp

GROUPS = 4
"""Groups of CodeGen's projection; each has queries, values and keys, in this order."""


class GptjDecoder(ParallelLayerNormDecoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        part = (config.hf_config.rotary_dim or config.head_dim) / config.head_dim
        rope = config.rope_parameters | {"partial_rotary_factor": part}
        return [Rotary(config, build, rope)] * config.num_layers


class GPTJForCausalLM(CausalLM):
    ignored_fields = frozenset({"head_dim"})
    config_fields = {"n_head": INTEGER, "n_layer": INTEGER}
    decoder = GptjDecoder
    weight_map = OldWeightMap(
        stacked=QKV_SHARDS,
        tied=CausalLM.weight_map.tied,
        prefixes={"transformer.": "model."},
        names={
            "embed_tokens": "wte", "layers": "h", "norm": "ln_f", "input_layernorm": "ln_1",
            "self_attn": "attn", "o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out",
        },
        masks=(".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),
    )  # fmt: skip

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        halves = RowOrder.halves(config.head_dim, config.hf_config.rotary_dim)
        return {"q_proj": halves, "k_proj": halves}

    mlp = staticmethod(plain_mlp)

    @staticmethod
    def head_bias(hf: Any) -> bool:
        return True


class CodeGenForCausalLM(GPTJForCausalLM):
    attention = FusedAttention

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        hidden, size = config.num_heads * config.head_dim, config.head_dim
        per_group = hidden // GROUPS
        halves = RowOrder.halves(size, config.hf_config.rotary_dim).order
        plain = range(size)
        return {"qkv_proj": RowOrder(tuple(
            (3 * group + part) * per_group + head * size + row
            for part, order in ((0, halves), (2, halves), (1, plain)) for group in range(GROUPS)
            for head in range(per_group // size) for row in order
        ))}  # fmt: skip
