"""Configurations of families that `transformers` does not know: their fields by the usual names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import DeepseekV3Config, FalconConfig, PreTrainedConfig

from ...core.errors import ConfigError
from ...core.protocols.field_kinds import (
    COUNT,
    INTEGER,
    NUMBER,
    NUMBERS_OR_NULLS,
    OBJECT,
    POSITIVE,
    POSITIVE_OR_LIST,
    SIZE,
    TEXTS,
    FieldKind,
    wrong_field,
)

FILE = "config.json"
MIXTURE: dict[str, FieldKind] = {
    "moe_intermediate_size": SIZE.not_null(),
    "num_experts_per_tok": SIZE.not_null(),
    "routed_scaling_factor": NUMBER.not_null(),
}


def wrong(field: str, value: Any, expected: str) -> ConfigError:
    return wrong_field(FILE, field, value, expected)


def check_count(fields: Mapping[str, Any], *names: str, scope: str = "") -> None:
    """Raise ConfigError where one of these is missing or not a positive integer."""
    for name in names:
        COUNT.required().check(FILE, fields, name, scope)


class RenamedConfig:
    """Reads config.json's fields by the family's names, and makes some available by the usual
    ones.
    """

    usual: ClassVar[Mapping[str, str]] = {}
    """Usual name → the family's own."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    config_fields: ClassVar[Mapping[str, FieldKind]] = {}
    """Kinds of the family's own fields, which are checked before `from_dict`."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        own = {"tie_word_embeddings": False} | dict(cls.defaults) | config_dict
        own.pop("model_type", None)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            theirs = cls.usual.get(name, name)
            check_count(own, theirs if theirs in own else name)
        name = cls.usual.get("intermediate_size", "intermediate_size")
        if name in own and not own[name]:
            raise wrong(name, own[name], "an integer of at least 1, or a list of them")
        renamed = {name: own[theirs] for name, theirs in cls.usual.items() if theirs in own}
        return PreTrainedConfig(**(own | renamed))


class LlamaLikeConfig(RenamedConfig):
    """Aquila, DeciLM, InternLM 1 and 2, MiMo, Ouro, Pangu Embedded, Solar Pro, TeleChat 3, XVERSE:
    Llama's fields; `bias` may replace `attention_bias`.
    """

    usual = {"attention_bias": "bias"}
    defaults = {"hidden_act": "silu"}


class ArcticConfig(RenamedConfig):
    usual = {"use_residual": "parallel_attn_mlp_res"}
    defaults = {
        "hidden_act": "silu", "rope_theta": 1e6, "moe_layer_frequency": 2, "use_residual": False,
        "num_experts_per_tok": 1, "num_local_experts": 8,
    }  # fmt: skip
    config_fields = dict.fromkeys(("num_experts_per_tok", "num_local_experts"), SIZE.not_null())


class BaichuanConfig(RenamedConfig):
    usual = {"max_position_embeddings": "model_max_length"}
    config_fields = {"model_max_length": NUMBER}


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


class LoopCoderConfig(RenamedConfig):
    defaults = {"hidden_act": "silu", "loop_num": 2, "loop_window_size": 64}


class MiniCPMConfig(RenamedConfig):
    defaults = {"tie_word_embeddings": True, "hidden_act": "silu"}


class MiniMaxText01Config(RenamedConfig):
    """MiniMax-Text-01 and M1: factors under the names of `transformers`' MiniMax."""

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
        """`attn_type_list` has 1 for full attention and 0 for lightning attention."""
        own = dict(config_dict)
        kinds = own.get("attn_type_list") or own.get("decoder_attention_types")
        kinds = kinds or [1] * own["num_hidden_layers"]
        names = {0: "linear_attention", 1: "full_attention"}
        own["layer_types"] = [names.get(kind, str(kind)) for kind in kinds]
        return super().from_dict(own)


class OrionConfig(RenamedConfig):
    usual = {"layer_norm_eps": "rms_norm_eps"}


class PanguUltraConfig(RenamedConfig):
    """DeepSeek V3's fields, plus flags for further norms and a router bias."""

    defaults = {
        "hidden_act": "silu", "attention_bias": False, "q_lora_rank": None, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "n_shared_experts": None, "first_k_dense_replace": 0, "sandwich_norm": False,
        "router_enable_expert_bias": False,
    }  # fmt: skip
    config_fields = MIXTURE | {"n_routed_experts": SIZE.not_null()}


class Plamo2Config(RenamedConfig):
    usual = {"head_dim": "hidden_size_per_head"}
    defaults = {
        "tie_word_embeddings": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4, "hidden_size_per_head": 128, "attention_window_size": 2048,
        "full_attention_idx": None, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_num_heads": 64,
        "mamba_step": 2, "mamba_enabled": True, "max_position_embeddings": 2048,
    }  # fmt: skip


class Plamo3Config(RenamedConfig):
    defaults = {
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 2048,
    }  # fmt: skip
    config_fields = {
        "num_hidden_layers": COUNT.required(), "rope_local_theta": POSITIVE.not_null(),
        "rope_theta": POSITIVE.not_null(), "sliding_window_pattern": COUNT.not_null(),
        "window_size": COUNT.not_null(),
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """Full attention recurs at a fixed interval, with its own rotation."""
        own = {
            "window_size": 128, "sliding_window_pattern": 8, "rope_theta": 150000.0,
            "rope_local_theta": 10000.0, "rope_scaling_factor": 1, **config_dict,
        }  # fmt: skip
        every = own["sliding_window_pattern"]
        own["layer_types"] = [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(own["num_hidden_layers"])
        ]
        own["sliding_window"] = own["window_size"]
        whole = {"rope_type": "default", "rope_theta": own.pop("rope_theta")}
        if own["rope_scaling_factor"] != 1:
            whole |= {
                "rope_type": "yarn", "factor": own["rope_scaling_factor"], "truncate": False,
                "original_max_position_embeddings": own["initial_context_length"],
                "beta_fast": 32.0, "beta_slow": 1.0,
            }  # fmt: skip
        local = {"rope_type": "default", "rope_theta": own["rope_local_theta"]}
        own["rope_parameters"] = {"full_attention": whole, "sliding_attention": local}
        return super().from_dict(own)


class RefinedWebConfig:
    """Falcon's fields, by the names of its remote code."""

    config_fields: ClassVar[Mapping[str, FieldKind]] = {"n_head": INTEGER, "n_layer": INTEGER}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """The first generation does not state the number of keys."""
        own = {name: value for name, value in config_dict.items() if name != "model_type"}
        for theirs, name in (
            ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"),
            ("n_embed", "hidden_size"), ("n_head_kv", "num_kv_heads"),
        ):  # fmt: skip
            if theirs in own:
                own[name] = own.pop(theirs)
        own.setdefault("new_decoder_architecture", "num_kv_heads" in own)
        return FalconConfig(**own)


class QWenConfig(RenamedConfig):
    """The first Qwen: an MLP has half of `intermediate_size`; contexts end at `seq_length`."""

    usual = {
        "rms_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base",
        "head_dim": "kv_channels", "max_position_embeddings": "seq_length",
    }  # fmt: skip
    defaults = {"hidden_act": "silu"}
    config_fields = {"seq_length": INTEGER}


class ChatGLMConfig(RenamedConfig):
    usual = {
        "num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size", "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length", "rms_norm_eps": "layernorm_epsilon",
        "attention_bias": "add_qkv_bias",
    }  # fmt: skip
    defaults = {"hidden_act": "silu"}
    config_fields = {"ffn_hidden_size": INTEGER, "seq_length": INTEGER}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """Half of each head is rotated; `rope_ratio` scales the base."""
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
    """Ling and Ring."""

    defaults = {
        "hidden_act": "silu", "use_qk_norm": False, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True, "num_shared_experts": 0,
        "first_k_dense_replace": 0,
    }  # fmt: skip
    config_fields = MIXTURE | {"num_experts": SIZE.not_null()}

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


class Param2MoeConfig(BailingConfig):
    """Ling's fields with other defaults; the size of shared experts is their sum."""

    defaults = {
        **BailingConfig.defaults, "score_function": "sigmoid", "num_shared_experts": 1,
        "moe_router_enable_expert_bias": True, "first_k_dense_replace": 1,
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        own = {"num_shared_experts": 1, **config_dict}
        if size := own.get("moe_shared_expert_intermediate_size"):
            own["moe_shared_expert_intermediate_size"] = size // own["num_shared_experts"]
        return super().from_dict(own)


class SarvamMlaConfig(RenamedConfig):
    """DeepSeek V3's fields, some by Ling's names."""

    usual = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    defaults = {
        "hidden_act": "silu", "attention_bias": False, "q_lora_rank": None, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }  # fmt: skip
    config_fields = MIXTURE | {"num_experts": SIZE.not_null()}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        own = dict(config_dict)
        rope = dict(own.pop("rope_scaling", None) or own.pop("rope_parameters", None) or {})
        kind = rope.pop("type", None) or rope.get("rope_type") or "default"
        rope["rope_type"] = kind.removeprefix("deepseek_")
        own["rope_parameters"] = {"rope_theta": own.get("rope_theta", 10000.0), **rope}
        return super().from_dict(own)


class Step1Config(RenamedConfig):
    usual = {
        "num_key_value_heads": "num_attention_groups", "max_position_embeddings": "max_seq_len",
    }  # fmt: skip
    defaults = {
        "tie_word_embeddings": True, "hidden_act": "silu", "num_attention_groups": 1,
        "rms_norm_eps": 1e-5, "max_seq_len": 4096,
    }  # fmt: skip
    config_fields = {
        "max_seq_len": COUNT.not_null(), "num_attention_groups": COUNT.not_null(),
        "rms_norm_eps": NUMBER.not_null(),
    }  # fmt: skip


class StepConfig(RenamedConfig):
    """Step 3.5. Rotation bases are per layer, or one number."""

    usual = {"num_key_value_heads": "num_attention_groups", "num_experts_per_tok": "moe_top_k"}
    defaults = {
        "attention_bias": False, "att_impl_type": "GQA", "attention_other_setting": None,
        "layer_types": None, "moe_router_activation": "softmax", "moe_router_scaling_factor": 1.0,
        "norm_expert_weight": True, "num_nextn_predict_layers": 0, "partial_rotary_factors": None,
        "sliding_window": None, "swiglu_limits": None, "swiglu_limits_shared": None,
        "use_head_wise_attn_gate": False, "use_moe_router_bias": True, "use_rope_layers": None,
        "yarn_only_types": None,
    }  # fmt: skip
    config_fields = {
        "attention_other_setting": OBJECT, "max_seq_len": INTEGER,
        "moe_intermediate_size": SIZE.not_null(), "moe_num_experts": COUNT.required(),
        "moe_router_scaling_factor": NUMBER.not_null(), "moe_top_k": COUNT.required(),
        "num_attention_groups": INTEGER, "num_hidden_layers": COUNT.required(),
        "num_nextn_predict_layers": INTEGER, "partial_rotary_factors": NUMBERS_OR_NULLS,
        "rope_theta": POSITIVE_OR_LIST, "share_expert_dim": SIZE,
        "swiglu_limits": NUMBERS_OR_NULLS, "swiglu_limits_shared": NUMBERS_OR_NULLS,
        "yarn_only_types": TEXTS,
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """Lists may be longer than the number of layers."""
        own = dict(config_dict)
        count = own["num_hidden_layers"]
        for name in (
            "layer_types", "partial_rotary_factors", "rope_theta", "swiglu_limits",
            "swiglu_limits_shared", "use_rope_layers",
        ):  # fmt: skip
            listed = own.get(name)
            if isinstance(listed, list) and listed and len(listed) < count:
                raise wrong(name, listed, f"a list of {count} or more, one for each layer")
        if other := own.get("attention_other_setting"):
            scope = "attention_other_setting."
            names = ("num_attention_heads", "num_attention_groups", "head_dim")
            check_count(other, *names, scope=scope)
            if other["num_attention_heads"] % other["num_attention_groups"]:
                raise wrong(scope + names[1], other[names[1]], f"a divisor of {other[names[0]]}")
            if other["head_dim"] % 2:
                raise wrong(scope + names[2], other[names[2]], "even")
            if not own.get("layer_types"):
                raise wrong("layer_types", own.get("layer_types"), "a list of texts")
            if not isinstance(other.get("attention_type"), str):
                raise wrong(scope + "attention_type", other.get("attention_type"), "a text")
        if own.get("layer_types"):
            own["layer_types"] = own["layer_types"][:count]
        bases = own.pop("rope_theta", None) or 500000.0
        own["layer_rope_theta"] = bases if isinstance(bases, list) else [bases] * count
        own["layer_rope_scaling"] = own.pop("rope_scaling", None)
        own["moe_layers"] = sparse_layers(own)
        if own.get("share_expert_dim") is None:
            own["share_expert_dim"] = own["moe_intermediate_size"] * own["moe_top_k"]
        if own.get("max_position_embeddings") is None:
            own["max_position_embeddings"] = own["max_seq_len"]
        return super().from_dict(own)


class Step3TextConfig(RenamedConfig):
    usual = {
        "num_key_value_heads": "num_attention_groups", "num_experts_per_tok": "moe_top_k",
        "max_position_embeddings": "max_position_embedding",
    }  # fmt: skip
    defaults = {
        "norm_expert_weight": False, "num_attention_groups": 1, "rope_theta": 500000.0,
        "share_q_dim": None,
    }  # fmt: skip
    config_fields = {
        "max_position_embedding": INTEGER, "moe_intermediate_size": SIZE.not_null(),
        "moe_num_experts": COUNT.required(), "moe_top_k": COUNT.required(),
        "num_attention_groups": INTEGER, "num_hidden_layers": COUNT.required(),
        "share_expert_dim": SIZE.not_null(), "share_q_dim": INTEGER,
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        return super().from_dict({**config_dict, "moe_layers": sparse_layers(config_dict)})


def sparse_layers(config: dict[str, Any]) -> list[int]:
    """Return the layers with mixtures in Step's config.json: a list, or a text with commas; by
    default all but the first.
    """
    listed = config.get("moe_layers_enum")
    if listed is None:
        return list(range(1, config["num_hidden_layers"]))
    parts = listed.split(",") if isinstance(listed, str) else listed
    try:
        return [int(layer) for layer in parts]
    except (TypeError, ValueError):
        expected = "a list of integers, or a text with commas between them"
        raise wrong("moe_layers_enum", listed, expected) from None


class TelechatConfig(RenamedConfig):
    usual = {
        "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "intermediate_size": "ffn_hidden_size", "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
    }  # fmt: skip
    defaults = {"hidden_act": "silu", "seq_length": 8192}
    config_fields = dict.fromkeys(("ffn_hidden_size", "n_head", "n_layer", "seq_length"), INTEGER)


class TeleFLMConfig(RenamedConfig):
    defaults = {
        "hidden_act": "silu", "use_mup": False, "input_mult": 1.0, "output_mult": 1.0,
        "mup_scale_factor": 1.0,
    }  # fmt: skip
    config_fields = dict.fromkeys(
        ("input_mult", "mup_scale_factor", "output_mult"), POSITIVE.not_null()
    )
