"""Checks config.json's fields first, so that errors name file and field.

These are `core`'s and common fields; families declare their own (`config_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..protocols.field_kinds import (
    FLAG,
    INTEGER,
    INTEGER_OR_INTEGERS,
    LARGEST_SIZE,
    NUMBER,
    NUMBERS,
    OBJECT,
    POSITIVE,
    SIZE,
    SIZE_OR_SIZES,
    TEXT,
    TEXTS,
    FieldKind,
)

SHARED: dict[str, FieldKind] = {
    **dict.fromkeys(
        (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "max_position_embeddings",
        ),
        SIZE,
    ),
    "intermediate_size": SIZE_OR_SIZES,
    **dict.fromkeys(("pad_token_id", "sliding_window", "type_vocab_size"), INTEGER),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), INTEGER_OR_INTEGERS),
    **dict.fromkeys(
        ("layer_norm_eps", "layer_norm_epsilon", "partial_rotary_factor", "rms_norm_eps"), NUMBER
    ),
    "rope_theta": POSITIVE,
    **dict.fromkeys(("attention_bias", "is_decoder", "mlp_bias", "tie_word_embeddings"), FLAG),
    **dict.fromkeys(("dtype", "hidden_act", "model_type", "problem_type", "torch_dtype"), TEXT),
    **dict.fromkeys(("architectures", "layer_types"), TEXTS),
    **dict.fromkeys(
        ("id2label", "label2id", "quantization_config", "rope_parameters", "rope_scaling"), OBJECT
    ),
}  # fmt: skip
"""Families with other kinds declare them."""
ALIASES = frozenset({
    "activation_function", "bias", "enable_bias", "ffn_dim", "ffn_hidden_size", "n_inner",
    "n_routed_experts", "n_shared_experts", "norm_epsilon", "num_shared_experts", "use_bias",
})  # fmt: skip
"""Other common names."""
ROPE: dict[str, FieldKind] = {
    **dict.fromkeys(
        (
            "attention_factor", "high_freq_factor", "low_freq_factor", "mscale", "mscale_all_dim",
            "partial_rotary_factor",
        ),
        NUMBER,
    ),
    **dict.fromkeys(
        ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings", "rope_theta"),
        POSITIVE,
    ),
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "truncate": FLAG,
    **dict.fromkeys(("long_factor", "short_factor"), NUMBERS),
}  # fmt: skip
"""Fields of `rope_parameters` and `rope_scaling`, also per layer type."""


def check_fields(file: Path, raw: dict[str, Any], kinds: Mapping[str, FieldKind] = SHARED) -> None:
    _check(file, raw, kinds, "")
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name) or {}
        _check(file, rope, ROPE, f"{name}.")
        for key, value in rope.items():
            if isinstance(value, dict):
                _check(file, value, ROPE, f"{name}.{key}.")


def check_sizes(file: Path, hf_config: Any, kinds: Mapping[str, FieldKind] = SHARED) -> None:
    """Raise ConfigError for an integer that is not a size."""
    for name, kind in kinds.items():
        if kind.least is None:
            continue
        value = getattr(hf_config, name, None)
        if isinstance(value, int) and not kind.least <= value <= LARGEST_SIZE:
            raise ConfigError(
                f"model: {file} has {name} {value}, which is no size of a model", param="model"
            )
    heads, kv_heads = (
        getattr(hf_config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ConfigError(
            f"model: {file} has num_attention_heads {heads}, which is no multiple of "
            f"num_key_value_heads {kv_heads}",
            param="model",
        )


def _check(
    file: Path, fields: Mapping[str, Any], kinds: Mapping[str, FieldKind], scope: str
) -> None:
    for name, kind in kinds.items():
        kind.check(file, fields, name, scope)
