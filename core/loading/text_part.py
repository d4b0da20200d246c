"""The text part of a multimodal checkpoint: its configuration, and the names of its tensors.

Without images, sound or video such a model is a decoder like any other: the positions of a rotation
in three dimensions are equal, and no layer reads states of another encoder.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError
from .json_file import with_texts

Read: TypeAlias = Callable[[dict[str, Any], str | None], Any]
"""(a config.json's content, architecture; None: the one that the content names) → configuration"""
NESTED = ("text_config", "llm_config", "language_config")
"""Fields of config.json that hold the text part's configuration, for types that `transformers` does
not know; the first that a file has."""
OF_THE_WHOLE = ("quantization_config", "dtype", "torch_dtype")
"""Fields that the outer configuration decides, if it has them."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that the outer configuration fills in."""
PREFIXES = {
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.": "",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
    "llm.": "",
}
"""Start of a tensor's name → what stands there in a checkpoint of the text part alone."""
PLAIN = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")
"""Starts of names of the text part that have no prefix."""


def inner_name(name: str) -> str | None:
    """Return the name that a tensor, or a layer, has in a checkpoint of the text part alone; None
    for one of another part."""
    for prefix, new in PREFIXES.items():
        if name.startswith(prefix):
            return new + name[len(prefix) :]
    return name if name.startswith(PLAIN) else None


def text_config(file: Path, raw: dict[str, Any], read: Read, architecture: str) -> Any:
    """Return the configuration of the text part of a config.json.

    architecture: of the text part; "": the one that its configuration names, or that has its model
    type in `transformers`. Raises ConfigError.
    """
    from transformers import CONFIG_MAPPING

    inner: Any = next((raw[name] for name in NESTED if isinstance(raw.get(name), dict)), {})
    outer: Any = None
    if raw.get("model_type") in CONFIG_MAPPING:
        outer = read(raw, None)
        config = copy.copy(outer.get_text_config(decoder=True))
    elif inner:
        by_type = None if inner.get("architectures") else _of_type(inner.get("model_type"))
        config = read(dict(inner), architecture or by_type)
    else:
        raise ConfigError(
            f"model: {file} has no {' or '.join(NESTED)}, which would describe the "
            "part of the model that reads text",
            param="model",
        )
    if architecture:
        config = _as_type_of(architecture, config, read)
    else:
        architecture = _architecture(file, inner, config)
    config.architectures = [architecture]
    if (tied := raw.get("tie_word_embeddings")) is None:
        # A class of the whole may have a default of its own.
        tied = any(getattr(part, "tie_word_embeddings", None) for part in (outer, config))
    config.tie_word_embeddings = bool(tied)
    for name in OF_THE_WHOLE:
        if raw.get(name) is not None:
            setattr(config, name, with_texts(raw[name], lambda text: inner_name(text) or text))
    for name in TOKENS:
        if getattr(config, name, None) is None and raw.get(name) is not None:
            setattr(config, name, raw[name])
    return config


def _architecture(file: Path, inner: dict[str, Any], config: Any) -> str:
    names = inner.get("architectures") or [_of_type(config.model_type)]
    if not isinstance(names[0], str):
        raise ConfigError(
            f"model: {file}: no architecture is known for the text part's model_type "
            f"{config.model_type!r}",
            param="model",
        )
    return names[0]


def _of_type(model_type: object) -> str | None:
    """Return the architecture of a model type in `transformers`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: Mapping[Any, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return names.get(model_type) if isinstance(model_type, str) else None


def _as_type_of(architecture: str, config: Any, read: Read) -> Any:
    """Return a configuration with the values of `config`, of the type that an architecture has in
    `transformers`; `config` itself where that has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        types.setdefault(name, kind)  # Of a name with several types the first is its own.
    if architecture not in types:
        return config
    fields = config.to_dict()
    if fields.get("head_dim") is None:
        # Which a class of the text part alone may have another default for.
        fields["head_dim"] = config.hidden_size // config.num_attention_heads
    return read(fields | {"model_type": types[architecture]}, architecture)
