"""Granite 3 with experts: Granite's multipliers, mixtures in every layer, and beside them an MLP
for all tokens, or windows and sinks."""

from __future__ import annotations

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import StackedExperts, WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.mlp import GatedMLP
from .decoder import QKV_SHARDS, CausalLM
from .expert_fields import EXPERTS
from .granite import GraniteForCausalLM
from .granite_swa import GraniteSwaAttention, GraniteSwaDecoder
from .parts import renormalized_mixture

STORED_EXPERTS = {
    "experts.all_gate_up": "input_linear.weight",
    "experts.all_down": "output_linear.weight",
    "gate": "router.layer",
}
"""`WeightMap.names` of a mixture: one tensor for all experts."""
STORED_TOGETHER = {
    "all_gate_up": StackedExperts("gate_up_proj.weight", ("gate", "up"), joined=True),
    "all_down": StackedExperts("down_proj.weight"),
}


class GraniteMoeForCausalLM(GraniteForCausalLM):
    config_fields = EXPERTS
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=CausalLM.weight_map.tied,
        names={
            "mlp.shared_experts": "shared_mlp",
            "shared_experts.gate_up_proj": "shared_experts.input_linear",
            "shared_experts.down_proj": "shared_experts.output_linear",
            **STORED_EXPERTS,
            "mlp": "block_sparse_moe",
            "gate_up_proj": "input_linear",
            "down_proj": "output_linear",
        },
        together=STORED_TOGETHER,
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        inner = getattr(hf, "shared_intermediate_size", 0)
        shared = None
        if inner:
            shared = GatedMLP(hf.hidden_size, inner, hf.hidden_act, build, whole=True)
        return renormalized_mixture(hf, build, shared=shared)


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    pass


class GraniteMoeSWAForCausalLM(GraniteMoeForCausalLM):
    attention = GraniteSwaAttention
    decoder = GraniteSwaDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=CausalLM.weight_map.tied,
        names={"gate": "router", "mlp": "block_sparse_moe"},
        together={
            "gate_up_proj": StackedExperts("gate_up_proj.weight", ("gate", "up"), joined=True),
            "down_proj": StackedExperts("down_proj.weight"),
        },
    )
