"""Configurations of families that `transformers` does not know: their fields by the usual names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import DeepseekV3Config, PreTrainedConfig


class RenamedConfig:
    """Reads config.json's fields by their names, and some of them also by the usual ones."""

    usual: ClassVar[Mapping[str, str]] = {}
    """Usual name → the family's own."""
    defaults: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        own = {"tie_word_embeddings": False} | dict(cls.defaults) | config_dict
        own.pop("model_type", None)
        renamed = {name: own[theirs] for name, theirs in cls.usual.items() if theirs in own}
        return PreTrainedConfig(**(own | renamed))


class LlamaLikeConfig(RenamedConfig):
    """Aquila, DeciLM, InternLM 1 and 2, MiMo, Pangu Embedded, TeleChat 3, XVERSE: Llama's fields;
    `bias` may stand for `attention_bias`."""

    usual = {"attention_bias": "bias"}
    defaults = {"hidden_act": "silu"}


class BaichuanConfig(RenamedConfig):
    """Its 13B models have a `model_max_length` instead of positions."""

    usual = {"max_position_embeddings": "model_max_length"}


class DeepseekMoeConfig(RenamedConfig):
    defaults = {
        "hidden_act": "silu", "attention_bias": False, "norm_topk_prob": False,
        "first_k_dense_replace": 0, "moe_layer_freq": 1, "n_shared_experts": None,
    }  # fmt: skip


class ExaoneConfig(RenamedConfig):
    usual = {
        "num_hidden_layers": "num_layers", "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    }  # fmt: skip


class MiniCPMConfig(RenamedConfig):
    defaults = {"tie_word_embeddings": True, "hidden_act": "silu"}


class MiniMaxText01Config(RenamedConfig):
    """MiniMax-Text-01 and M1: their factors by the names of MiniMax in `transformers`."""

    usual = {
        f"{ours}_{factor}_factor": f"layernorm_{theirs}_{factor}"
        for ours, theirs in (
            ("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"),
        ) for factor in ("alpha", "beta")
    }  # fmt: skip
    defaults = {
        "hidden_act": "silu", "rope_theta": 10000.0, "sliding_window": None, "postnorm": False,
        **dict.fromkeys(usual.values(), 1.0),
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """A list says which layers attend to all tokens: 1, or 0 for lightning attention."""
        own = dict(config_dict)
        kinds = own.get("attn_type_list") or own.get("decoder_attention_types")
        kinds = kinds or [1] * own["num_hidden_layers"]
        names = {0: "linear_attention", 1: "full_attention"}
        own["layer_types"] = [names.get(kind, str(kind)) for kind in kinds]
        return super().from_dict(own)


class OrionConfig(RenamedConfig):
    usual = {"layer_norm_eps": "rms_norm_eps"}


class Plamo2Config(RenamedConfig):
    usual = {"head_dim": "hidden_size_per_head"}
    defaults = {
        "tie_word_embeddings": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4, "hidden_size_per_head": 128, "attention_window_size": 2048,
        "full_attention_idx": None, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_num_heads": 64,
        "mamba_step": 2, "mamba_enabled": True, "max_position_embeddings": 2048,
    }  # fmt: skip


class QWenConfig(RenamedConfig):
    """The first Qwen: an MLP has half of `intermediate_size`, and up to `seq_length` tokens are
    attended to without changes."""

    usual = {
        "rms_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base",
        "head_dim": "kv_channels", "max_position_embeddings": "seq_length",
    }  # fmt: skip
    defaults = {"hidden_act": "silu"}


class ChatGLMConfig(RenamedConfig):
    """ChatGLM 2 and 3, and GLM-4 9B of 2024."""

    usual = {
        "num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size", "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length", "rms_norm_eps": "layernorm_epsilon",
        "attention_bias": "add_qkv_bias",
    }  # fmt: skip
    defaults = {"hidden_act": "silu"}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """Half of each head is rotated, with a base that `rope_ratio` raises."""
        own = dict(config_dict)
        if own.get("multi_query_attention"):
            own["num_key_value_heads"] = own["multi_query_group_num"]
        own["rope_parameters"] = {
            "rope_type": "default", "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0 * (own.get("rope_ratio") or 1.0),
        }  # fmt: skip
        return super().from_dict(own)


class KimiK2Config:
    """DeepSeek V3's fields, under another model type."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        own = {name: value for name, value in config_dict.items() if name != "model_type"}
        return DeepseekV3Config(**own)


class BailingConfig(RenamedConfig):
    """Ling and Ring. A part of each head may be rotated."""

    defaults = {
        "hidden_act": "silu", "use_qk_norm": False, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True, "num_shared_experts": 0,
        "first_k_dense_replace": 0,
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        own = dict(config_dict)
        scaling = own.get("rope_scaling") or own.get("rope_parameters") or {}
        own["rope_parameters"] = {
            "rope_type": "default", "rope_theta": own.get("rope_theta", 10000.0),
            "partial_rotary_factor": own.get("partial_rotary_factor", 1.0), **scaling,
        }  # fmt: skip
        own.pop("rope_scaling", None)
        return super().from_dict(own)
