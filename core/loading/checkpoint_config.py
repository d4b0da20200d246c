"""A checkpoint's configuration, mostly without importing `transformers`, which takes seconds.

With a `PlainConfig`, `Configuration` returns config.json's values, and a few derived by
`transformers`' rules. Other access (defaults, methods, the class) creates the real object. A
config.json with unlisted fields goes to `transformers` at once.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, PluginError
from ..protocols.models import PlainConfig
from ..registry import Registry
from .transformers_module import transformers_module

NUMBER = (int, float)
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
FREE = frozenset({
    "bad_words_ids", "classifier_from_token", "is_causal", "is_matryoshka",
    "matryoshka_dimensions", "method", "position_embedding_type", "quantization_config",
    "sbert_ce_default_activation_function", "sentence_transformers", "use_pad_token",
})  # fmt: skip
"""Fields of any model type, kept unchanged."""
IGNORED = frozenset({"_name_or_path", "gradient_checkpointing", "output_past"})
"""As `FREE`, but never read here."""
SOMETIMES = frozenset({
    "attention_bias", "head_dim", "layer_types", "mlp_bias", "moe_intermediate_size",
    "num_experts", "num_experts_per_tok", "num_key_value_heads", "num_local_experts",
    "rope_parameters", "rope_scaling", "sliding_window", "type_vocab_size",
})  # fmt: skip
"""Fields of some model types that models read."""
ROPES: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    }),
}  # fmt: skip
"""rope_type → required numbers; with others, `transformers` decides."""
DTYPES = ("bfloat16", "float16", "float32")
PROBLEMS = (
    None, "regression", "single_label_classification", "multi_label_classification",
)  # fmt: skip


def checkpoint_config(file: Path, raw: dict[str, Any], plain: PlainConfig | None = None) -> Any:
    """Return a `transformers` configuration, or an equivalent `Configuration` by `plain`, which is
    registered for its model type.

    Runs no checkpoint code. Raises ConfigError as `transformers` does.
    """
    raw = {name: value for name, value in raw.items() if name != "auto_map"}
    fields = None if plain is None else _answers(raw, plain)
    if plain is None or fields is None:
        return _whole(file, raw)
    return Configuration(file, raw, fields, plain)


def plugin_config(file: Path, raw: dict[str, Any], configs: Registry[Any]) -> Any:
    """Return the configuration registered for `raw`'s model type.

    Raises ConfigError.
    """
    name = raw["model_type"]
    registered = configs.load(name)
    if isinstance(registered, PlainConfig):
        return checkpoint_config(file, raw, registered)
    try:
        with configs.calling(name, "from_dict"):
            config = registered.from_dict(copy.deepcopy(raw))
    except PluginError as error:
        raise ConfigError(f"model: {file}: {error}", param="model") from error
    if config is None:
        distribution = configs.entry(name).provenance.distribution
        raise ConfigError(
            f"model: the configuration class of {distribution} gave None", param="model"
        )
    if getattr(config, "model_type", None) in (None, ""):
        config.model_type = name
    return config


class Configuration:
    """Holds config.json's plain values; creates `transformers`' object for others."""

    __slots__ = ("_answers", "_file", "_made", "_plain", "_raw")

    def __init__(
        self, file: Path, raw: dict[str, Any], fields: dict[str, Any], plain: PlainConfig
    ) -> None:
        for name, value in zip(self.__slots__, (fields, file, None, plain, raw), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            if name in self._answers:
                return self._answers[name]
            lacks = name in FREE | SOMETIMES and name not in self._plain.fields
            if name == "rope_theta" or lacks:
                raise AttributeError(f"config.json has no {name}")
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The real class, for isinstance."""
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
        return Configuration, (self._file, self._raw, self._answers, self._plain)

    def _real(self) -> Any:
        if self._made is None:
            object.__setattr__(self, "_made", _whole(self._file, self._raw))
        return self._made


def _whole(file: Path, raw: dict[str, Any]) -> Any:
    """Return the `transformers` configuration; for an unknown model type, only config.json's
    values.
    """
    transformers = transformers_module()
    raw = _with_floats(copy.deepcopy(raw))
    model_type = raw.pop("model_type", None)
    try:
        kinds = transformers.CONFIG_MAPPING
        kind = kinds[model_type] if model_type in kinds else transformers.PreTrainedConfig
        config: Any = kind(**raw)
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


def drop_strays(config: Any, raw: dict[str, Any], names: Collection[str]) -> None:
    """Remove fields that the class in `transformers` lacks: it stores, but never reads them."""
    if type(config) is Configuration:  # It has none.
        return
    if raw.get("model_type") not in transformers_module().CONFIG_MAPPING:
        return
    text = config.get_text_config(decoder=True)
    strays = set(names).intersection(vars(text)) - FREE
    if not strays:
        return
    try:
        defaults = type(text)()
    except Exception:  # A class that has no defaults does not say which fields it has.
        return
    defaults.allow_global_per_layer_attribute_access = True
    for name in strays:
        if not hasattr(defaults, name):
            delattr(text, name)


def _with_floats(value: Any) -> Any:
    """Return a value with numbers that `transformers` writes as objects: {"__float__": "Infinity"}
    is infinity.
    """
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: _with_floats(item) for name, item in value.items()}


def _answers(raw: dict[str, Any], plain: PlainConfig) -> dict[str, Any] | None:
    """Return the plain values of a config.json, or None."""
    if not _is_plain(raw, plain):
        return None
    if "bad_words_ids" in raw:  # Which `transformers` leaves out, as of generation.
        return None
    values = {**plain.defaults, **{name: raw[name] for name in raw if name in plain.fields}}
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
    if "rope_parameters" in plain.fields and not _answer_decoder(values, plain):
        return None
    return values


def _is_plain(raw: dict[str, Any], plain: PlainConfig) -> bool:
    """Return whether `transformers` would not refuse, warn of, change, or hide any value."""
    field_names = plain.fields
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


def _answer_decoder(values: dict[str, Any], plain: PlainConfig) -> bool:
    """Add derived values; False if `transformers` is needed."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        return False
    if "head_dim" in plain.derived and values.get("head_dim") is None:
        values["head_dim"] = hidden // heads
    if (values.get("head_dim") or hidden // heads) % 2:
        return False
    if "num_experts" in plain.fields and not _answer_experts(values):
        return False
    if "num_key_value_heads" in plain.derived:
        values.setdefault("num_key_value_heads", heads)
    if "use_sliding_window" in plain.fields and not _answer_windows(values, plain):
        return False
    rope = _rope(values)
    if rope is None:
        return False
    values.pop("rope_theta", None)
    values["rope_parameters"] = values["rope_scaling"] = rope
    return True


def _answer_experts(values: dict[str, Any]) -> bool:
    """Add the number of experts under both names."""
    names = {"num_experts", "num_local_experts"} & values.keys()
    if len(names) != 1:
        return False
    values["num_experts"] = values["num_local_experts"] = values[names.pop()]
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = values["mlp_only_layers"] or []
    return all(type(layer) is int for layer in values.get("mlp_only_layers", ()))


def _answer_windows(values: dict[str, Any], plain: PlainConfig) -> bool:
    """Add layer types, from `use_sliding_window` and `max_window_layers`."""
    layers = values["num_hidden_layers"]
    if values.get("use_sliding_window", False):
        if "sliding_window" not in values:
            return False
        if "layer_types" in plain.fields and "max_window_layers" not in values:
            return False
    else:
        values["sliding_window"] = None
    if "layer_types" not in plain.fields:
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
    """Return the rope parameters from either form; None if `transformers` is needed."""
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
