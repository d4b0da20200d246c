"""MiMo-V2's configuration, under the names of `transformers`' MiMo-V2-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.protocols.field_kinds import COUNT, NUMBER
from .configs import RenamedConfig, check_count, wrong

KINDS = {
    "hybrid_layer_pattern": ("layer_types", ("full_attention", "sliding_attention")),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}
"""Per-layer list of numbers → usual field, and the meanings of 0 and 1."""


MIXTURE_SIZES = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")


class MiMoV2Config(RenamedConfig):
    usual = {"rms_norm_eps": "layernorm_epsilon"}
    defaults = {
        "hidden_act": "silu", "attention_bias": False, "attention_value_scale": None,
        "layernorm_epsilon": 1e-5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "rope_theta": 1e6, "partial_rotary_factor": 1.0, "attention_projection_layout": "split",
    }  # fmt: skip
    config_fields = {
        **dict.fromkeys(("head_dim", "num_hidden_layers"), COUNT.required()),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), COUNT.required()),
        "layernorm_epsilon": NUMBER.not_null(), "v_head_dim": COUNT.required(),
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        """The configured window excludes the token itself."""
        own: dict[str, Any] = dict(cls.defaults) | config_dict
        for field, (name, kinds) in KINDS.items():
            own[name] = kinds_of_layers(own, field, kinds)
        if "sliding_attention" in own["layer_types"]:
            size = own.get("sliding_window_size") or own.get("sliding_window")
            if type(size) is not int or size < 1:
                raise wrong("sliding_window_size", size, "an integer of at least 1")
            own["sliding_window"] = size + 1
            check_count(own, "swa_num_key_value_heads")
        if "sparse" in own["mlp_layer_types"]:
            check_count(own, *MIXTURE_SIZES)
        if own.get("routed_scaling_factor") is None:
            own["routed_scaling_factor"] = 1.0
        part, base = own["partial_rotary_factor"], own.pop("rope_theta")
        local = own.get("swa_rope_theta") or base
        own["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
            for kind, theta in (("full_attention", base), ("sliding_attention", local))
        }
        own.pop("rope_scaling", None)
        return super().from_dict(own)


def kinds_of_layers(config: Mapping[str, Any], field: str, kinds: tuple[str, str]) -> list[str]:
    """Raises ConfigError where it is none."""
    listed, count = config.get(field), config["num_hidden_layers"]
    numbers = listed if isinstance(listed, list) else []
    if len(numbers) < count or any(type(n) is not int or n not in (0, 1) for n in numbers):
        raise wrong(field, listed, f"a list of {count} numbers, 0 or 1")
    return [kinds[number] for number in numbers[:count]]
