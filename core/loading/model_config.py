"""The model's configuration, from the checkpoint and the engine's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from ..protocols.field_kinds import LARGEST_SIZE
from ..protocols.media import Spans
from ..registration.architecture import registered_name
from ..registry import Plugins
from .checkpoint_folder import checkpoint_folder
from .config_fields import check_sizes
from .config_file import SAFETENSORS, kinds_of_fields, model_class, read_config, read_config_file
from .dialects import NO_DIALECTS, Dialects, read_dialects
from .generation_config import (
    NO_DEFAULTS,
    SamplingDefaults,
    read_generation_config,
    sampling_defaults,
)
from .json_file import read_object, with_texts
from .text_part import inner_name

if TYPE_CHECKING:
    from ..protocols.audio import AudioSource, SpeechChat
    from .pooling_config import PoolingConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class SourceConfig:
    """How an encoder-decoder model's decoder begins."""

    decoder_start_token_id: int
    """First token of each sequence."""
    forced_bos_token_id: int | None = None
    """Second token, unless a request has a decoder prompt."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences that are never generated."""
    audio: AudioSource | None = None
    """Set if the encoder reads audio; otherwise it reads tokens."""


@dataclass(frozen=True)
class MediaConfig:
    """What prompts may have besides text."""

    architecture: str
    """Of the whole checkpoint, by which its `protocols.MediaModel` is registered."""
    modalities: tuple[str, ...]
    spans: Spans | None
    """As `MediaModel.spans` returns it."""
    speech: SpeechChat | None = None
    """As `MediaModel.speech` does, if prompts may have recordings."""


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's model, as the worker and the engine need to know it."""

    path: Path
    """Folder of the checkpoint."""
    architecture: str
    hf_config: Any
    """The `transformers` configuration object, or what answers like it (`checkpoint_config`)."""
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    quantization_config: dict[str, Any] | None = None
    """As in config.json; None: the checkpoint is not quantized."""
    quantization_file: Path | None = None
    """Where `quantization_config` stands, for errors."""
    sampling: SamplingDefaults = NO_DEFAULTS
    """For what requests leave open."""
    dialects: Dialects = NO_DIALECTS
    """What the checkpoint says of its model's tool calls and reasoning."""
    pooling: PoolingConfig | None = None
    """How states become vectors; None: the model generates text (`resolve_pooling` decides)."""
    load_format: str = SAFETENSORS
    """The weight loader that `EngineConfig.load_format` auto means."""
    text_part_of: str | None = None
    """Architecture of the checkpoint, if `architecture` is that of its text part."""
    source: SourceConfig | None = None
    """Set for an encoder-decoder model (`resolve_source`): requests have a source, of at most
    `max_model_len` tokens, besides the decoder's prompt."""
    whole_config: Any = None
    """The `transformers` configuration object of the checkpoint, if `hf_config` is that of its text
    part."""
    media: MediaConfig | None = None
    """Set where prompts may have media (`resolve_media`)."""
    text_alone: str = ""
    """Why prompts may have no media, though the checkpoint has an encoder, in one clause."""

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """What requests may have: text, and items of media; audio alone for a model of speech."""
        if self.source is not None and self.source.audio is not None:
            return ("audio",)
        return ("text", *(() if self.media is None else self.media.modalities))

    @property
    def whole_prompts(self) -> bool:
        """Whether the tokens of a prompt see each other, so that a step has all of them."""
        if self.pooling is not None and not self.pooling.causal:
            return True
        return self.media is not None and self.media.spans is Spans.PROMPT

    @property
    def num_layers(self) -> int:
        return int(self.hf_config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.hf_config.hidden_size)

    @property
    def num_heads(self) -> int:
        return int(self.hf_config.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        return int(getattr(self.hf_config, "num_key_value_heads", None) or self.num_heads)

    @property
    def head_dim(self) -> int:
        explicit = getattr(self.hf_config, "head_dim", None)
        return int(explicit or self.hidden_size // self.num_heads)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Of the whole model, whichever way the checkpoint spells them."""
        return rope_parameters(self.hf_config)


def _overridden(raw: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """Return config.json with `hf_overrides`. Raises ConfigError."""
    overrides = config.hf_overrides or {}
    facts = raw | overrides
    rope, theta = facts.get("rope_parameters"), overrides.get("rope_theta")
    if theta is None or not isinstance(rope, dict) or "rope_parameters" in overrides:
        return facts
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            "hf_overrides: rope_theta: this checkpoint has rope_parameters for each kind of layer; "
            "override rope_parameters",
            param="hf_overrides",
        )
    return facts | {"rope_parameters": rope | {"rope_theta": theta}}


def resolve_model_config(config: EngineConfig, plugins: Plugins | None = None) -> ModelConfig:
    """Read config.json, or a checkpoint format's file, perhaps with a configuration class of
    `plugins`. Raises LoadError (no checkpoint), ConfigError.
    """
    folder = checkpoint_folder(config.model, config.revision, config.download_dir)
    file, raw, load_format = read_config_file(folder, config, plugins)
    hf_config, text_part_of, whole_config = read_config(file, _overridden(raw, config), plugins)
    if text_part_of is not None:
        # What only these say is said of the text part, such as how it classifies.
        for name, value in (config.hf_overrides or {}).items():
            if name not in raw and not hasattr(hf_config, name):
                setattr(hf_config, name, value)
    architectures = getattr(hf_config, "architectures", None) or []
    if not architectures:
        raise ConfigError(f"model: {file} names no architecture", param="model")
    architecture = architectures[0]
    if not isinstance(getattr(hf_config, "vocab_size", None), int):
        if plugins is not None:  # Of one that is not served, the reason is said.
            model_type = getattr(hf_config, "model_type", None)
            registered_name(plugins["model"], config, architecture, model_type)
        raise ConfigError(f"model: {file} gives no vocab_size", param="model")
    kinds = kinds_of_fields(plugins, architecture, getattr(hf_config, "model_type", None))
    check_sizes(file, hf_config, kinds)
    model = None if plugins is None else model_class(plugins, architecture)
    generation = read_generation_config(folder, config)
    vocab_size = _resolve_vocabulary(hf_config, model)
    quantization, quantization_file = _quantization(file, hf_config, plugins, model, text_part_of)
    return ModelConfig(
        path=folder,
        architecture=architecture,
        hf_config=hf_config,
        dtype=_resolve_dtype(config, hf_config),
        max_model_len=_resolve_length(config, hf_config, model),
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(hf_config, generation, vocab_size),
        sampling=sampling_defaults(generation, config),
        dialects=read_dialects(folder),
        quantization_config=quantization,
        quantization_file=quantization_file,
        load_format=load_format,
        text_part_of=text_part_of,
        whole_config=whole_config,
    )


def _quantization(
    file: Path, hf_config: Any, plugins: Plugins | None, model: Any, text_part_of: str | None
) -> tuple[dict[str, Any] | None, Path]:
    """→ `quantization_config`, or a quantization method's file instead, with the model's layer
    names, and the file. Raises ConfigError, LoadError.
    """
    value = getattr(hf_config, "quantization_config", None)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f"model: {file} has quantization_config {value!r}, which is no JSON object",
            param="quantization_config",
        )
    names = {found.name for found in file.parent.glob("*quant*.json")}
    if value is None and plugins is not None and names:
        methods = plugins["quantization"]
        for entry in methods.entries():
            if (own := getattr(methods.load(entry.name), "config_file", None)) in names:
                file = file.parent / own
                value = {"quant_method": entry.name, **read_object(file)}
                break
        if text_part_of is not None:
            value = with_texts(value, lambda text: inner_name(text) or text)
    return _by_own_names(value, model), file


def _by_own_names(quantization: dict[str, Any] | None, model: Any) -> dict[str, Any] | None:
    """Return `quantization_config` with the model's layer names, if the checkpoint has prefixes
    (`WeightMap.prefixes`).
    """
    prefixes: Mapping[str, str] = getattr(getattr(model, "weight_map", None), "prefixes", {})

    def own(text: str) -> str:
        old = next((old for old in prefixes if text.startswith(old)), None)
        return text if old is None else prefixes[old] + text.removeprefix(old)

    renamed: dict[str, Any] | None = with_texts(quantization, own) if prefixes else quantization
    return renamed


def _resolve_dtype(config: EngineConfig, hf_config: Any) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if config.device == "cpu":
        return torch.float32
    checkpoint_dtype = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
    if isinstance(checkpoint_dtype, str):
        checkpoint_dtype = DTYPES.get(checkpoint_dtype.removeprefix("torch."))
    return (
        checkpoint_dtype if checkpoint_dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    )


def _resolve_vocabulary(hf_config: Any, model: Any) -> int:
    """Return the number of tokens. `model`: the architecture's class, or None."""
    if hasattr(model, "vocabulary_size"):
        return int(model.vocabulary_size(hf_config))
    return int(hf_config.vocab_size)


def _resolve_length(config: EngineConfig, hf_config: Any, model: Any) -> int:
    """Return the context length: the model's, or a possible `max_model_len`. `model`: the
    architecture's class, or None.

    `max_position_embeddings` includes rope scaling, except linear, and yarn whose original length
    equals it. A dynamic rope is stretched only on demand, as it changes short texts, too.
    """
    if hasattr(model, "context_length"):
        stated = model.context_length(hf_config)
    else:
        stated = getattr(hf_config, "max_position_embeddings", None) or None
    own = stated or 2048
    # A model that states no length keeps a state, which has none.
    reach = stated or LARGEST_SIZE
    rope = rope_parameters(hf_config)
    factor = float(rope.get("factor") or 1.0)
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or own
        own = reach = max(own, _stretched(original, factor))
    elif rope["rope_type"] == "linear":
        own = reach = _stretched(own, factor)
    elif rope["rope_type"] == "dynamic":
        reach = _stretched(own, factor)
    length = config.given_model_len
    if length is None:
        return own
    if length > reach:
        raise ConfigError(
            f"max_model_len: {length} is more than this model's {reach}; lower it, "
            "or scale its rope with hf_overrides",
            param="max_model_len",
        )
    return length


def _stretched(length: float, factor: float) -> int:
    return int(min(length * factor, LARGEST_SIZE))


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """Return the rope parameters, from `rope_parameters`, or `rope_scaling` and `rope_theta`."""
    rope = dict(
        getattr(hf_config, "rope_parameters", None)
        or getattr(hf_config, "rope_scaling", None)
        or {}
    )
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = getattr(hf_config, "rope_theta", None) or 10000.0
    if rope.get("rope_type") is None:
        rope["rope_type"] = rope.get("type") or "default"
    return rope


def _eos_token_ids(
    hf_config: Any, generation: Mapping[str, Any], vocab_size: int
) -> frozenset[int]:
    """Return the end tokens within the vocabulary."""
    token_ids: list[Any] = []
    for value in (getattr(hf_config, "eos_token_id", None), generation.get("eos_token_id")):
        token_ids += value if isinstance(value, list) else [value]
    return frozenset(t for t in token_ids if isinstance(t, int) and 0 <= t < vocab_size)
