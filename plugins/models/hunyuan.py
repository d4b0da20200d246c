"""Hunyuan (dense): Llama with norms of heads after the rotation."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.protocols.field_kinds import FLAG
from .decoder import CausalLM, Decoder, HeadlessLM
from .parts import RotatedFirstAttention


class HunYuanAttention(RotatedFirstAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        eps = config.hf_config.rms_norm_eps
        self.q_norm = RMSNorm(self.head_dim, eps, build)
        self.k_norm = RMSNorm(self.head_dim, eps, build)


class HunYuanDecoder(Decoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """A dynamic rope with `alpha` has its base raised once, for any length."""
        rope, dim = config.rope_parameters, config.head_dim
        if rope["rope_type"] == "dynamic" and rope.get("alpha"):
            base = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
            rope = {"rope_type": "default", "rope_theta": base}
        return [Rotary(config, build, rope)] * config.num_layers


class HunYuanDenseV1ForCausalLM(CausalLM):
    config_fields = {"use_cla": FLAG}
    attention = HunYuanAttention
    decoder = HunYuanDecoder
    weight_map = WeightMap(
        stacked=HeadlessLM.weight_map.stacked,
        tied=HeadlessLM.weight_map.tied,
        names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        if getattr(config.hf_config, "use_cla", False):
            raise ConfigError(
                "use_cla: layers that share keys and values are not supported", param="use_cla"
            )
        super().__init__(config, build)
