"""Converts params.json of Mistral's own checkpoints to `transformers`' config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....core.errors import ConfigError
from ....core.loading.json_file import read_object
from ....core.protocols.field_kinds import (
    FLAG,
    LARGEST_SIZE,
    NUMBER,
    OBJECT,
    POSITIVE,
    SIZE,
    TEXT,
    FieldKind,
    wrong_field,
)

logger = logging.getLogger("jackfield.loading")

NAMES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps", "vocab_size": "vocab_size",
}  # fmt: skip
"""Name in params.json → name in config.json."""
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Fields of latent attention, with equal names in both files."""
EXPERTS = {
    "num_experts": "n_routed_experts", "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts", "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace", "route_every_n": "moe_layer_freq",
    "routed_scale": "routed_scaling_factor", "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}  # fmt: skip
"""`moe` of models with latent attention → config.json."""
SIZED = ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size")
KINDS: dict[str, FieldKind] = {
    **dict.fromkeys(SIZED, SIZE.required()),
    **dict.fromkeys(
        ("n_kv_heads", "head_dim", "max_seq_len", "max_position_embeddings", *LATENT), SIZE
    ),
    "norm_eps": NUMBER.required(),
    "rope_theta": POSITIVE,
    "tied_embeddings": FLAG,
    **dict.fromkeys(("activation", "dtype", "model_type"), TEXT),
    **dict.fromkeys(
        ("llama_4_scaling", "moe", "multimodal", "quantization", "vision_encoder", "yarn"), OBJECT
    ),
}
UNREAD = frozenset({
    "_sliding_window", "causal", "model_parallel", "ragged_attention", "renorm_strategy",
    "rope_scaling_factor", "use_biases", "use_cache",
})  # fmt: skip
"""Fields without meaning here: any tensor that they announce is refused by its name."""
YARN: dict[str, FieldKind] = {
    **dict.fromkeys(("factor", "original_max_position_embeddings"), POSITIVE.required()),
    **dict.fromkeys(("alpha", "beta"), POSITIVE),
    "apply_scale": FLAG,
}
SCALING: dict[str, FieldKind] = {
    "beta": NUMBER.required(),
    "original_max_position_embeddings": POSITIVE.required(),
}
MOE: dict[str, FieldKind] = {
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), SIZE.required()),
    **dict.fromkeys(EXPERTS.keys() - {"num_experts", "num_experts_per_tok"}, NUMBER),
}
MOST_LAYERS = 10_000
"""More layers are an error; the list of windows would fill the memory."""
LENGTH = 128_000
"""Length of a model that states none, as in mistral-inference."""
ENCODERS = ("multimodal", "vision_encoder")


def config_of(folder: Path) -> dict[str, Any]:
    """Return the equivalent config.json. Raises ConfigError, LoadError."""
    file = folder / "params.json"
    params = read_object(file)
    for name, kind in KINDS.items():
        kind.check(file, params, name)
        size, most = params.get(name), MOST_LAYERS if name == "n_layers" else LARGEST_SIZE
        if kind.least is not None and size is not None and not kind.least <= size <= most:
            raise wrong_field(file, name, size, f"an integer from {kind.least} to {most}")
    if params.get("model_type", "transformer") != "transformer":
        raise wrong_field(file, "model_type", params["model_type"], "transformer")
    if unknown := sorted(params.keys() - KINDS.keys() - UNREAD - {"sliding_window"}):
        logger.warning("%s: fields that are not read: %s", file, ", ".join(unknown))
    if any(params.get(name) for name in ENCODERS):
        logger.info(
            "%s: of the model the part that reads text is served: requests have no images or sound",
            file,
        )
    lengths = (params.get("max_position_embeddings"), params.get("max_seq_len"))
    heads = params["n_heads"]
    config = {
        **{theirs: params[ours] for ours, theirs in NAMES.items() if params.get(ours) is not None},
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "hidden_act": params.get("activation") or "silu",
        "max_position_embeddings": min(filter(None, lengths), default=LENGTH),
        "tie_word_embeddings": bool(params.get("tied_embeddings")),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": _rope(file, params),
    }
    if params.get("dtype") is not None:
        config["dtype"] = params["dtype"]
    if params.get("quantization"):
        config["quantization_config"] = _quantization(file, params["quantization"])
    return config | _family(file, params)


def _family(file: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture and its specific fields."""
    moe, latent = params.get("moe") or {}, params.get("qk_nope_head_dim") is not None
    if moe:
        for name, kind in MOE.items():
            kind.check(file, moe, name, "moe.")
    windows = _windows(file, params)
    scaling = _scaling(file, params)
    if latent:
        if not moe:
            raise ConfigError(
                f"model: {file} has qk_nope_head_dim without moe: latent attention is served with "
                "a mixture of experts alone",
                param="model",
            )
        return {
            "architectures": ["MistralLarge3ForCausalLM"], "model_type": "deepseek_v3",
            **{name: params.get(name) for name in LATENT},
            **{theirs: moe[ours] for ours, theirs in EXPERTS.items() if ours in moe},
            "norm_topk_prob": True, "scoring_func": "softmax", "topk_method": None,
            "llama_4_scaling": scaling,
        }  # fmt: skip
    if moe:
        if scaling:
            raise wrong_field(file, "llama_4_scaling", scaling, "missing where moe is given")
        return {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": moe["num_experts"],
            "num_experts_per_tok": moe["num_experts_per_tok"],
            "sliding_window": _one_window(file, windows),
        }  # fmt: skip
    if scaling:
        return {
            "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3",
            "llama_4_scaling": scaling, "sliding_window": _one_window(file, windows),
        }  # fmt: skip
    if None in windows and any(windows):
        return {
            "architectures": ["MinistralForCausalLM"], "model_type": "ministral",
            "sliding_window": next(filter(None, windows)),
            "layer_types": [
                "full_attention" if window is None else "sliding_attention" for window in windows
            ],
        }  # fmt: skip
    return {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral",
        "sliding_window": _one_window(file, windows),
    }  # fmt: skip


def _windows(file: Path, params: Mapping[str, Any]) -> list[int | None]:
    """Return each layer's window: `sliding_window` is a number, or a repeated pattern."""
    value = params.get("sliding_window")
    pattern = value if isinstance(value, list) else [value]
    sizes = [window for window in pattern if window is not None]
    integers = all(type(size) is int and size > 0 for size in sizes)
    if not pattern or not integers or len(set(sizes)) > 1:
        raise wrong_field(
            file, "sliding_window", value, "an integer, or a list of it and null for layers in turn"
        )
    return [pattern[layer % len(pattern)] for layer in range(params["n_layers"])]


def _one_window(file: Path, windows: list[int | None]) -> int | None:
    """Return the window common to all layers."""
    if len(set(windows)) > 1:
        raise ConfigError(
            f"model: {file} has a sliding_window in some layers, which is not supported beside moe "
            "or llama_4_scaling",
            param="model",
        )
    return windows[0]


def _scaling(file: Path, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how queries grow with their position; None: constant."""
    scaling: dict[str, Any] | None = params.get("llama_4_scaling") or None
    for name, kind in SCALING.items() if scaling else ():
        kind.check(file, scaling or {}, name, "llama_4_scaling.")
    return scaling


def _rope(file: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope parameters. The default rope_theta is mistral-inference's: 10,000 for models
    with windows, 1,000,000 for others.
    """
    default = 10_000.0 if params.get("sliding_window") else 1_000_000.0
    theta = float(params.get("rope_theta") or default)
    yarn = params.get("yarn")
    if not yarn:
        return {"rope_type": "default", "rope_theta": theta}
    for name, kind in YARN.items():
        kind.check(file, yarn, name, "yarn.")
    if unknown := sorted(yarn.keys() - YARN.keys()):
        raise ConfigError(f"model: {file}: yarn.{unknown[0]} is not supported", param="model")
    rope: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": float(yarn["factor"]),
        "original_max_position_embeddings": int(yarn["original_max_position_embeddings"]),
    }
    if yarn.get("beta") is not None:
        rope["beta_fast"] = float(yarn["beta"])
    if yarn.get("alpha") is not None:
        rope["beta_slow"] = float(yarn["alpha"])
    if yarn.get("apply_scale") is False:
        return rope | {"attention_factor": 1.0}
    if params.get("qk_nope_head_dim") is not None:
        # Latent attention has the factor in the scale of its scores.
        return rope | {"mscale": 1.0, "mscale_all_dim": 1.0}
    return rope


def _quantization(file: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `quantization_config`: float8 with a scale for each tensor, or compressed-tensors' own
    fields.
    """
    method = str(given.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors":
        return {**given, "quant_method": method}
    if given.get("qformat_weight") != "fp8_e4m3":
        raise wrong_field(
            file, "quantization.qformat_weight", given.get("qformat_weight"), "fp8_e4m3"
        )
    schemes = {None: "static", "TENSOR": "static", "NO_SCALES": "dynamic"}
    scheme = given.get("qscheme_act")
    if scheme not in schemes:
        raise wrong_field(file, "quantization.qscheme_act", scheme, "TENSOR or NO_SCALES")
    return {"quant_method": "fp8", "activation_scheme": schemes[scheme]}
