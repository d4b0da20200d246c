"""ChatGLM 2 and 3, and GLM-4 9B of 2024: GLM by other names, queries, keys and values together."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from .decoder import CausalLM, Decoder
from .glm4 import Glm4Attention, Glm4Model
from .parts import FusedAttention, OldWeightMap


class ChatGLMAttention(Glm4Attention, FusedAttention):
    """GLM's pairs of neighbours over one tensor."""


class ChatGLMModel(Glm4Model, CausalLM):
    attention = ChatGLMAttention
    decoder = Decoder
    weight_map = OldWeightMap(
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={
            "transformer.embedding.word_embeddings.": "model.embed_tokens.",
            "transformer.output_layer.": "lm_head.", "transformer.encoder.": "model.",
        },
        names={
            "norm": "final_layernorm", "self_attn": "self_attention",
            "qkv_proj": "query_key_value", "o_proj": "dense",
            "gate_up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h",
        },
        masks=("rotary_pos_emb.inv_freq",),
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf: Any = config.hf_config
        for field, served in (
            ("rmsnorm", True), ("add_bias_linear", False), ("post_layer_norm", True),
            ("apply_residual_connection_post_layernorm", False), ("original_rope", True),
        ):  # fmt: skip
            if (value := getattr(hf, field, served)) is not served:
                raise ConfigError(f"{field}: {value!r} is not supported", param=field)
        super().__init__(config, build)
