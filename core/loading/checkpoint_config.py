"""A checkpoint's configuration, without the seconds that importing `transformers` takes.

For the families below, config.json states nearly all values that are read. `Configuration` returns
them, and a few others by rules as plain as `transformers`' own. Reading anything else (a default, a
method, its class) creates the real object, which is used from then on. A config.json with anything
but what is listed here goes to `transformers` at once, which then says what is wrong with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, PluginError
from ..registry import Registry

INT, FLOAT, NUMBER, TEXT, BOOL = (int,), (float,), (int, float), (str,), (bool,)
NONE = type(None)
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
COMMON: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(SIZES, INT),
    **dict.fromkeys(TOKENS, (int, NONE)),
    "eos_token_id": (int, list, NONE),
    "architectures": (list, NONE),
    "chunk_size_feed_forward": INT,
    "dtype": (str, NONE),
    "hidden_act": TEXT,
    "id2label": (dict, NONE),
    "initializer_range": FLOAT,
    "is_encoder_decoder": BOOL,
    "label2id": (dict, NONE),
    "output_hidden_states": BOOL,
    "problem_type": (str, NONE),
    "return_dict": BOOL,
    "tie_word_embeddings": BOOL,
    "torch_dtype": (str, NONE),
    "transformers_version": (str, NONE),
    "use_cache": BOOL,
}
"""What every family has: name → exact types, as `transformers` validates them or narrower."""
DECODER = COMMON | {
    "attention_dropout": NUMBER,
    "num_key_value_heads": INT,
    "rms_norm_eps": FLOAT,
    "rope_parameters": (dict, NONE),
    "rope_scaling": (dict, NONE),
    "rope_theta": NUMBER,
}
QWEN2 = DECODER | {
    "layer_types": (list, NONE),
    "max_window_layers": INT,
    "sliding_window": (int, NONE),
    "use_sliding_window": BOOL,
}
EXPERTS = DECODER | {
    "head_dim": (int, NONE),
    "num_experts": INT,
    "num_experts_per_tok": INT,
    "num_local_experts": INT,
    "output_router_logits": BOOL,
    "router_aux_loss_coef": FLOAT,
    "sliding_window": (int, NONE),
}
ENCODER = COMMON | {
    "add_cross_attention": BOOL,
    "attention_probs_dropout_prob": NUMBER,
    "classifier_dropout": (int, float, NONE),
    "hidden_dropout_prob": NUMBER,
    "is_decoder": BOOL,
    "layer_norm_eps": FLOAT,
    "type_vocab_size": INT,
}
FREE = frozenset({
    "bad_words_ids", "classifier_from_token", "is_causal", "is_matryoshka",
    "is_original_qwen3_reranker", "matryoshka_dimensions", "method",
    "position_embedding_type", "quantization_config",
    "sbert_ce_default_activation_function", "sentence_transformers", "use_pad_token",
})  # fmt: skip
"""Fields of no family: kept unchanged if present."""
IGNORED = frozenset({"_name_or_path", "gradient_checkpointing", "output_past"})
"""Like `FREE`, in many a config.json, and read by nothing here."""
SOMETIMES = frozenset({
    "attention_bias", "head_dim", "layer_types", "mlp_bias", "moe_intermediate_size",
    "num_experts", "num_experts_per_tok", "num_key_value_heads", "num_local_experts",
    "rope_parameters", "rope_scaling", "sliding_window", "type_vocab_size",
})  # fmt: skip
"""Fields that models read although only some families have them."""
ROPES: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    }),
}  # fmt: skip
"""rope_type → the numbers that it must have; with others besides, `transformers` decides."""
DTYPES = ("bfloat16", "float16", "float32")
PROBLEMS = (
    None, "regression", "single_label_classification", "multi_label_classification",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model type of `transformers`, with what this module knows of it."""

    fields: dict[str, tuple[type, ...]]
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of `transformers` for fields that checkpoints omit and models read."""


MULTIPLIERS = (
    "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier",
)  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
ROBERTA = Family(ENCODER, {"is_decoder": False, "eos_token_id": 2})
FAMILIES = {
    "llama": Family(
        DECODER
        | {
            "attention_bias": BOOL,
            "head_dim": (int, NONE),
            "mlp_bias": BOOL,
            "pretraining_tp": (int, NONE),
        },
        {"attention_bias": False, "mlp_bias": False, **UNTIED},
    ),
    "mistral": Family(DECODER | {"head_dim": (int, NONE), "sliding_window": (int, NONE)}, UNTIED),
    "qwen2": Family(QWEN2, UNTIED),
    "qwen3": Family(
        QWEN2 | {"attention_bias": BOOL, "head_dim": INT}, {"attention_bias": False, **UNTIED}
    ),
    "mixtral": Family(
        EXPERTS | {"router_jitter_noise": FLOAT},
        {"head_dim": None, "rope_theta": 1000000.0, "sliding_window": None, **UNTIED},
    ),
    "qwen3_moe": Family(
        EXPERTS
        | {
            "attention_bias": BOOL,
            "decoder_sparse_step": INT,
            "head_dim": INT,
            "max_window_layers": INT,
            "mlp_only_layers": (list, NONE),
            "moe_intermediate_size": INT,
            "norm_topk_prob": BOOL,
            "use_sliding_window": BOOL,
        },
        {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            **UNTIED,
        },
    ),
    "granite": Family(
        DECODER | {"attention_bias": BOOL, "mlp_bias": BOOL} | dict.fromkeys(MULTIPLIERS, NUMBER),
        {"attention_bias": False, "mlp_bias": False, **dict.fromkeys(MULTIPLIERS, 1.0), **UNTIED},
    ),
    "olmo2": Family(DECODER | {"attention_bias": BOOL}, {"attention_bias": False, **UNTIED}),
    "bert": Family(ENCODER, {"is_decoder": False, "eos_token_id": None}),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
}


def checkpoint_config(file: Path, raw: dict[str, Any]) -> Any:
    """Return a `transformers` configuration, or an equivalent `Configuration`, for config.json's
    content.

    No code of the checkpoint runs. Raises ConfigError for what `transformers` does not take.
    """
    raw = {name: value for name, value in raw.items() if name != "auto_map"}
    fields = _answers(raw)
    return _whole(file, raw) if fields is None else Configuration(file, raw, fields)


def plugin_config(file: Path, raw: dict[str, Any], configs: Registry[Any]) -> Any:
    """Return the configuration from the class that a plugin registered for the model type of `raw`.

    Raises ConfigError when it does not take `raw`, and for a type that Jackfield reads itself, if
    the plugin did not say that it overrides that.
    """
    name = raw["model_type"]
    entry = next(entry for entry in configs.entries() if entry.name == name)
    if name in FAMILIES and not entry.override:
        raise ConfigError(
            f"model: the plugin {entry.provenance.distribution} registered a configuration for "
            f"model_type {name!r}, which Jackfield reads itself: leave the plugin out "
            f"(disable_plugins), or have it register with override=True",
            param="model",
        )
    config_class = configs.load(name)
    try:
        with configs.calling(name, "from_dict"):
            config = config_class.from_dict(copy.deepcopy(raw))
    except PluginError as error:
        raise ConfigError(f"model: {file}: {error}", param="model") from error
    if config is None:
        distribution = entry.provenance.distribution
        raise ConfigError(
            f"model: the configuration class of {distribution} gave None", param="model"
        )
    if getattr(config, "model_type", None) in (None, ""):
        config.model_type = name
    return config


class Configuration:
    """Holds the values that config.json states plainly; creates `transformers`' object for all
    others."""

    __slots__ = ("_answers", "_file", "_made", "_raw")

    def __init__(self, file: Path, raw: dict[str, Any], fields: dict[str, Any]) -> None:
        for name, value in zip(self.__slots__, (fields, file, None, raw), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            if name in self._answers:
                return self._answers[name]
            if name == "rope_theta" or (name in FREE | SOMETIMES and not self._has(name)):
                raise AttributeError(f"config.json has no {name}")
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The real object's class, for isinstance."""
        return type(self._real())

    def __eq__(self, other: object) -> bool:
        return bool(self._real() == other)

    def __iter__(self) -> Iterator[str]:
        return iter(self._real())

    def __repr__(self) -> str:
        return repr(self._real())

    def __reduce__(self) -> tuple[Any, ...]:
        if self._made is not None:
            return tuple(self._made.__reduce_ex__(4))
        return Configuration, (self._file, self._raw, self._answers)

    def _has(self, name: str) -> bool:
        return name in FAMILIES[self._raw["model_type"]].fields

    def _real(self) -> Any:
        if self._made is None:
            object.__setattr__(self, "_made", _whole(self._file, self._raw))
        return self._made


def _whole(file: Path, raw: dict[str, Any]) -> Any:
    """Return the `transformers` configuration; for an unknown model type, one that only contains
    what config.json says, for a plugin's architecture."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    raw = _with_floats(copy.deepcopy(raw))
    model_type = raw.pop("model_type", None)
    try:
        supported = model_type in CONFIG_MAPPING
        config: Any = (CONFIG_MAPPING[model_type] if supported else PreTrainedConfig)(**raw)
    except Exception as error:  # transformers validates with errors of many kinds
        raise ConfigError(
            f"model: {file} is not a valid {model_type!r} configuration: "
            f"{' '.join(str(error).split())}",
            param="model",
        ) from error
    config.model_type = model_type
    parts: tuple[Any, ...] = (config, getattr(config, "text_config", None))
    for part in parts:
        # Where layers differ, `per_layer_config` says so to the families that have such layers.
        if getattr(part, "is_heterogeneous", False):
            part.allow_global_per_layer_attribute_access = True
    return config


def _with_floats(value: Any) -> Any:
    """Return a JSON value with the numbers that `transformers` writes as objects: infinity as
    {"__float__": "Infinity"}. Others of such a form are left as they are."""
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: _with_floats(item) for name, item in value.items()}


def _answers(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values that follow plainly from a config.json; None if `transformers` has to read
    it."""
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not _is_plain(raw, family):
        return None
    if "bad_words_ids" in raw:  # Which `transformers` leaves out, as of generation.
        return None
    values = family.defaults | {name: raw[name] for name in raw if name in family.fields}
    values |= {name: raw[name] for name in raw if name in FREE or name == "model_type"}
    values.setdefault("problem_type", None)
    values.setdefault("architectures", None)
    dtype = values.get("dtype") or values.get("torch_dtype")
    values["dtype"] = values["torch_dtype"] = None if dtype is None else getattr(torch, dtype)
    labels = values.get("id2label")
    if labels is None:
        labels = {"0": "LABEL_0", "1": "LABEL_1"}
    values["id2label"] = {int(key): label for key, label in labels.items()}
    values["num_labels"] = len(labels)
    values.pop("label2id", None)
    if values["problem_type"] == "single_label_classification" and len(labels) == 1:
        return None
    if "rope_parameters" in family.fields and not _answer_decoder(values, family):
        return None
    return values


def _is_plain(raw: dict[str, Any], family: Family) -> bool:
    """Return whether `transformers` would neither refuse, warn of, change, nor hide any of the
    values."""
    field_names = family.fields
    for name, value in raw.items():
        if name in field_names:
            if type(value) not in field_names[name]:
                return False
        elif name not in FREE and name not in IGNORED and name != "model_type":
            return False
    if not all(raw.get(name, 0) >= 1 for name in SIZES):
        return False
    texts, labels, ids = raw.get("architectures"), raw.get("id2label"), raw.get("label2id")
    return (
        all(type(text) is str for text in texts or ())
        and all(_is_index(k) and type(text) is str for k, text in (labels or {}).items())
        and all(type(index) is int for index in (ids or {}).values())
        and all(type(token) is int and 0 <= token < raw["vocab_size"] for token in _tokens(raw))
        and all(raw.get(name) in (None, *DTYPES) for name in ("dtype", "torch_dtype"))
        and raw.get("problem_type") in PROBLEMS
        and 0 <= raw.get("initializer_range", 0) <= 1
    )


def _tokens(raw: dict[str, Any]) -> Iterator[Any]:
    for name in TOKENS:
        value = raw.get(name)
        if isinstance(value, list):
            yield from value
        elif value is not None:
            yield value


def _is_index(text: object) -> bool:
    return type(text) is str and text.isascii() and text.isdecimal()


def _answer_decoder(values: dict[str, Any], family: Family) -> bool:
    """Add the values that follow from others; False if that needs `transformers`."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        return False
    if values["model_type"] in ("llama", "mistral") and values.get("head_dim") is None:
        values["head_dim"] = hidden // heads
    if (values.get("head_dim") or hidden // heads) % 2:
        return False
    if "num_experts" in family.fields and not _answer_experts(values):
        return False
    if values["model_type"] in ("llama", "granite", "olmo2"):
        values.setdefault("num_key_value_heads", heads)
    if "use_sliding_window" in family.fields and not _answer_windows(values, family):
        return False
    rope = _rope(values)
    if rope is None:
        return False
    values.pop("rope_theta", None)
    values["rope_parameters"] = values["rope_scaling"] = rope
    return True


def _answer_experts(values: dict[str, Any]) -> bool:
    """Add the number of experts under both of its names."""
    names = {"num_experts", "num_local_experts"} & values.keys()
    if len(names) != 1:
        return False
    values["num_experts"] = values["num_local_experts"] = values[names.pop()]
    if values["model_type"] == "qwen3_moe":
        values["mlp_only_layers"] = values["mlp_only_layers"] or []
    return all(type(layer) is int for layer in values.get("mlp_only_layers", ()))


def _answer_windows(values: dict[str, Any], family: Family) -> bool:
    """Add each layer's type, from Qwen's `use_sliding_window` and `max_window_layers`."""
    layers = values["num_hidden_layers"]
    if values.get("use_sliding_window", False):
        if "sliding_window" not in values:
            return False
        if "layer_types" in family.fields and "max_window_layers" not in values:
            return False
    else:
        values["sliding_window"] = None
    if "layer_types" not in family.fields:
        return True
    types = values.get("layer_types")
    if types is None:
        first = layers if values["sliding_window"] is None else values["max_window_layers"]
        types = [
            "full_attention" if layer < first else "sliding_attention" for layer in range(layers)
        ]
    values["layer_types"] = types
    return len(types) == layers and all(
        kind in ("full_attention", "sliding_attention") for kind in types
    )


def _rope(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rope parameters, from `rope_parameters` or `rope_scaling` and `rope_theta`; None
    if they need `transformers`."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    rope.setdefault("rope_theta", values.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    kind, length = rope["rope_type"], values["max_position_embeddings"]
    if not isinstance(kind, str) or kind not in ROPES:
        return None
    if kind in ("yarn", "llama3"):
        rope.setdefault("original_max_position_embeddings", length)
    numbers = {name: value for name, value in rope.items() if name not in ("type", "rope_type")}
    if numbers.keys() != ROPES[kind] | {"rope_theta"}:
        return None
    if not all(type(value) in NUMBER for value in numbers.values()):
        return None
    original, factor = numbers.get("original_max_position_embeddings", 1), numbers.get("factor", 1)
    if factor < 1 or type(original) is not int or original < 1:
        return None
    if kind == "yarn" and length / original not in (1, factor):
        return None
    if kind == "llama3" and (
        numbers["high_freq_factor"] <= numbers["low_freq_factor"] or original >= length
    ):
        return None
    return rope
