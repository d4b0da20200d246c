"""Nemotron 3 Puzzle's configuration: Nemotron-H's, with an object per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import NemotronHConfig

from .configs import check_count, wrong

KINDS = {
    "attention": "full_attention", "mamba": "linear_attention", "mlp": "mlp", "moe": "moe",
}  # fmt: skip
"""`block_type` → layer type in `transformers`' Nemotron-H."""
MIXTURE = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "moe_shared_expert_intermediate_size", "moe_latent_size", "n_group", "topk_group",
)  # fmt: skip
SIZES = {
    "attention": ("sliding_window",), "mamba": (), "mlp": ("intermediate_size",), "moe": MIXTURE,
}  # fmt: skip
"""Integers that a layer may override, by `block_type`."""
COMMON = (
    "hidden_size", "n_groups", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel",
    *MIXTURE[:4],
)  # fmt: skip
"""Integers common to all layers."""
FREE = {"routed_scaling_factor": (int, float), "norm_topk_prob": (bool,)}
"""Other fields that a mixture may override, with their types."""


class NemotronPuzzleConfig:
    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        own = {name: value for name, value in config_dict.items() if name != "model_type"}
        blocks = own.pop("block_configs", None)
        if not isinstance(blocks, list) or not blocks:
            raise wrong("block_configs", blocks, "a list of objects, one for each layer")
        layers = [layer_of(block, number) for number, block in enumerate(blocks)]
        for name in ("hybrid_override_pattern", "layers_block_type", "mtp_hybrid_override_pattern"):
            own.pop(name, None)
        own["layers_block_type"] = [KINDS[block["block_type"]] for block in blocks]
        check_count(own, *(own.keys() & set(COMMON)))
        config = NemotronHConfig(**{name: v for name, v in own.items() if v is not None})
        for number, layer in enumerate(layers):
            check_layer(config, layer, number)
        config.block_configs = layers
        return config


def layer_of(block: Any, number: int) -> dict[str, Any]:
    """Return a layer's overrides. Raises ConfigError for unknown ones."""
    scope = f"block_configs[{number}]"
    kind = block.get("block_type") if isinstance(block, dict) else None
    if kind not in KINDS:
        raise wrong(f"{scope}.block_type", kind, f"one of {', '.join(KINDS)}")
    own = {k: v for k, v in block.items() if v is not None and k != "block_type"}
    check_count(own, *(own.keys() & set(SIZES[kind])), scope=f"{scope}.")
    return own


def check_layer(config: Any, layer: Mapping[str, Any], number: int) -> None:
    """Raise ConfigError where a layer changes a common field, or has a wrong type."""
    for name, value in layer.items():
        place, common = f"block_configs[{number}].{name}", getattr(config, name, None)
        if name in FREE:
            if type(value) not in FREE[name]:
                raise wrong(place, value, "a number" if float in FREE[name] else "true or false")
        elif name not in (*MIXTURE, "intermediate_size", "sliding_window") and value != common:
            raise wrong(place, value, f"what all layers have: {common!r}")
