"""A multimodal checkpoint's text part: configuration and tensor names.

Without images, sound or video it is an ordinary decoder: positions of a 3D rotation are equal. What
reads images is a part of the model beside it (`protocols.MediaModel`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError
from .json_file import with_texts

Read: TypeAlias = Callable[[dict[str, Any], str | None], Any]
"""(config.json's content, architecture; None: the content's) → configuration"""
NESTED = ("text_config", "llm_config", "language_config")
"""Fields with the text part's configuration, for types unknown to `transformers`, in order."""
OF_THE_WHOLE = ("quantization_config", "dtype", "torch_dtype")
"""Fields that the outer configuration decides."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that the outer configuration fills in."""
PREFIXES = {
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.model.": "model.",  # As transformers 5.17 saves some.
    "language_model.": "",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
    "llm.": "",
    "vlm.model.language_model.": "model.",
    "vlm.language_model.model.": "model.",
    "vlm.language_model.lm_head.": "lm_head.",
    "vlm.language_model.": "model.",
}
"""Name prefix → prefix in a text-only checkpoint."""
PLAIN = ("lm_head.", "embedding_proj_layer.", "model.embed_tokens.", "model.layers.", "model.norm.")
"""Unprefixed name starts of the text part."""


def inner_name(name: str) -> str | None:
    """Return a tensor's or layer's name in a text-only checkpoint; None for other parts."""
    for prefix, new in PREFIXES.items():
        if name.startswith(prefix):
            return new + name[len(prefix) :]
    return name if name.startswith(PLAIN) else None


def is_multimodal(architecture: str) -> bool:
    """Whether `transformers` lists an architecture as one that writes text and reads more."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    names: Mapping[str, str] = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return architecture in names.values()


def text_config(
    file: Path,
    raw: dict[str, Any],
    read: Read,
    architecture: str,
    types: Mapping[str, str],
    registered: bool,
) -> tuple[Any, Any]:
    """Return the text part's configuration, and the whole's (None for a type that is not known).

    architecture: of the text part; "": that of its type in `types`, its configuration's, or its
    type's in `transformers`. registered: a plugin has a configuration class for the whole, which
    need be no type of `transformers`, and which may leave the text part's to its own type. Raises
    ConfigError.
    """
    from transformers import CONFIG_MAPPING

    inner: Any = next((raw[name] for name in NESTED if isinstance(raw.get(name), dict)), {})
    outer: Any = None
    if not architecture and isinstance(inner.get("model_type"), str):
        architecture = types.get(inner["model_type"], "")
    if registered or raw.get("model_type") in CONFIG_MAPPING:
        outer = read(raw, None)
    if outer is not None and (not registered or hasattr(outer.get_text_config(), "vocab_size")):
        config = copy.copy(outer.get_text_config(decoder=True))
        architecture = architecture or types.get(config.model_type, "")
    elif inner:
        by_type = None if inner.get("architectures") else _of_type(inner.get("model_type"))
        config = read(dict(inner), architecture or by_type)
        if outer is not None:
            outer.text_config = config
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
    return config, outer


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
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: Mapping[Any, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return names.get(model_type) if isinstance(model_type, str) else None


def _as_type_of(architecture: str, config: Any, read: Read) -> Any:
    """Return `config`'s values as an architecture's type in `transformers`, or `config` itself."""
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
