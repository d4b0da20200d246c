"""EXAONE 3 and 3.5: Llama by other names."""

from __future__ import annotations

from ...core.loading.weight_map import Shard, WeightMap
from .decoder import QKV_SHARDS, CausalLM


class ExaoneForCausalLM(CausalLM):
    weight_map = WeightMap(
        stacked=QKV_SHARDS
        | {"c_fc_0": Shard("gate_up_proj", "gate"), "c_fc_1": Shard("gate_up_proj", "up")},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"transformer.": "model."},
        names={
            "embed_tokens": "wte", "layers": "h", "norm": "ln_f", "self_attn": "attn.attention",
            "o_proj": "out_proj", "down_proj": "c_proj",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
        },
    )  # fmt: skip
