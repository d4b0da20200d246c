"""Checks the types of fields of a config.json that all families share.

The file's own content is checked before anything is built from it, so that the error for a wrong
value names the file and the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shown


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    # NaN is none, and infinity no size of anything.
    return type(value) in (int, float) and abs(value) < 1e300


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _is_number_or_null(value: Any) -> bool:
    return value is None or _is_number(value)


def _number_or_numbers(value: Any) -> bool:
    return _is_number(value) or (bool(value) and _list_of(_is_number)(value))


def _int_or_ints(value: Any) -> bool:
    return _is_int(value) or _list_of(_is_int)(value)


KINDS: dict[str, tuple[Callable[[Any], bool], Iterable[str]]] = {
    "an integer": (
        _is_int,
        (
            "hidden_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
            "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_local_experts",
            "decoder_sparse_step", "max_window_layers", "pad_token_id", "sliding_window",
            "type_vocab_size", "ffn_hidden_size", "first_k_dense_replace", "group_norm_size",
            "kv_lora_rank", "loop_num", "loop_window_size", "max_position_embedding",
            "max_seq_len", "n_group", "n_head", "n_layer", "n_routed_experts", "n_shared_experts",
            "num_attention_groups", "num_nextn_predict_layers", "num_shared_experts", "q_lora_rank",
            "qk_nope_head_dim", "qk_rope_head_dim", "seq_length", "share_expert_dim",
            "share_q_dim", "topk_group", "total_ut_steps", "v_head_dim",
        ),
    ),
    "an integer or a list of integers": (
        _int_or_ints, ("bos_token_id", "eos_token_id", "intermediate_size"),
    ),
    "a number": (
        _is_number,
        (
            "attention_multiplier", "attn_logit_softcapping", "embedding_multiplier",
            "final_logit_softcapping", "layer_norm_eps", "layer_norm_epsilon", "logits_scaling",
            "model_max_length", "moe_router_scaling_factor", "partial_rotary_factor",
            "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_local_base_freq",
            "rope_local_theta", "routed_scaling_factor", "swiglu_limit",
        ),
    ),
    "a number or a list of numbers": (_number_or_numbers, ("rope_theta",)),
    "true or false": (
        _is_bool,
        (
            "attention_bias", "is_decoder", "mlp_bias", "norm_topk_prob", "tie_word_embeddings",
            "use_sliding_window",
        ),
    ),
    "a text": (
        _is_text,
        ("dtype", "hidden_act", "hidden_activation", "model_type", "problem_type", "torch_dtype"),
    ),
    "a list of texts": (_list_of(_is_text), ("architectures", "layer_types", "yarn_only_types")),
    "a list of integers": (
        _list_of(_is_int), ("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4", "mlp_only_layers"),
    ),
    "a list of numbers": (
        _list_of(_is_number_or_null),
        ("bskcn_tv", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"),
    ),
    "an object": (
        _is_object,
        (
            "attention_other_setting", "id2label", "label2id", "quantization_config",
            "rope_parameters", "rope_scaling",
        ),
    ),
}  # fmt: skip
ROPE_KINDS: dict[str, tuple[Callable[[Any], bool], Iterable[str]]] = {
    "a number": (
        _is_number,
        (
            "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor",
            "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings",
            "partial_rotary_factor", "rope_theta",
        ),
    ),
    "a text": (_is_text, ("rope_type", "type")),
    "true or false": (_is_bool, ("truncate",)),
    "a list of numbers": (_list_of(_is_number), ("long_factor", "short_factor")),
}  # fmt: skip
"""Of `rope_parameters` and `rope_scaling`, and of each layer type's in them."""
POSITIVE = (
    "factor",
    "original_max_position_embeddings",
    "query_pre_attn_scalar",
    "rope_local_theta",
    "rope_theta",
)


def check_fields(file: Path, raw: dict[str, Any]) -> None:
    """Raise ConfigError with the file's and the field's name; null counts as missing."""
    _check(file, raw, KINDS, "")
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name) or {}
        _check(file, rope, ROPE_KINDS, f"{name}.")
        for key, value in rope.items():
            if isinstance(value, dict):
                _check(file, value, ROPE_KINDS, f"{name}.{key}.")


def wrong(file: Path, field: str, value: Any, expected: str) -> ConfigError:
    """Return the error for a field's value."""
    return ConfigError(
        f"model: {file}: {field} must be {expected}, got {shown(value)}", param="model"
    )


def _check(
    file: Path,
    fields: dict[str, Any],
    kinds: dict[str, tuple[Callable[[Any], bool], Iterable[str]]],
    prefix: str,
) -> None:
    for expected, (fits, names) in kinds.items():
        for name in names:
            value = fields.get(name)
            if value is not None and not fits(value):
                raise wrong(file, prefix + name, value, expected)
            if name not in POSITIVE or value is None:
                continue
            if min(value if isinstance(value, list) else [value]) <= 0:
                raise wrong(file, prefix + name, value, "positive")
