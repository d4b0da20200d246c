"""The model's configuration, from the checkpoint and the engine's options.

A checkpoint's code is never imported: `auto_map` is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import EngineConfig
from ..errors import CheckpointNotFound, ConfigError, LoadError, shown
from ..protocols.field_kinds import LARGEST_SIZE, FieldKind, declared_fields
from ..protocols.media import Spans
from ..protocols.models import PlainConfig
from ..registration.architecture import FALLBACK, registered_name
from ..registration.checkpoint_formats import AUTO, config_format
from ..registry import Plugins
from .checkpoint_config import SOMETIMES, checkpoint_config, drop_strays, plugin_config
from .config_fields import ALIASES, SHARED, check_fields, check_sizes
from .dialects import NO_DIALECTS, Dialects, read_dialects
from .generation_config import (
    NO_DEFAULTS,
    SamplingDefaults,
    read_generation_config,
    sampling_defaults,
)
from .hub import CHECKPOINT_FILES, fetch_snapshot
from .json_file import read_object, with_texts
from .text_part import inner_name, is_multimodal, text_config

if TYPE_CHECKING:
    from ..protocols.audio import AudioSource, SpeechChat
    from .pooling_config import PoolingConfig

MODELS = Path(__file__).resolve().parents[2] / "plugins" / "models"
EMBEDDED_MODEL = MODELS / "embedded"
"""What an engine serves that is given no model."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COMMON = (SHARED.keys() | SOMETIMES | ALIASES) - {"head_dim"}
"""Fields that code for many families reads, whether or not a family has them. Models of
`transformers` read head_dim, too, but for those whose class here has it in `ignored_fields`."""


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
    load_format: str = "safetensors"
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
        if self.pooling is not None:
            return not self.pooling.causal
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
    file, raw, load_format = _read_file(folder, config, plugins)
    hf_config, text_part_of, whole_config = _read_config(file, _overridden(raw, config), plugins)
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
    kinds = _kinds_of_fields(plugins, architecture, getattr(hf_config, "model_type", None))
    check_sizes(file, hf_config, kinds)
    model = None if plugins is None else _model_class(plugins, architecture)
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


def checkpoint_folder(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder of a path, of a model that ships with Jackfield by its name there, of a hub
    name, which is fetched, or of the embedded model (empty)."""
    if not model:
        if not (EMBEDDED_MODEL / "config.json").is_file():
            raise LoadError("the embedded model is missing from this installation", param="model")
        return EMBEDDED_MODEL
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointNotFound(
            f"model: {model!r} is a file; name the folder with config.json and the weights",
            param="model",
        )
    if re.fullmatch("[a-z-]+", model):
        own = MODELS / model.replace("-", "_")
        if (own / "config.json").is_file():
            return own
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointNotFound(
            f"model: {model!r} is neither a folder here nor a hub name (owner/name)",
            param="model",
        )
    try:
        return fetch_snapshot(model, revision, CHECKPOINT_FILES, download_dir=download_dir)
    except LoadError:
        raise
    except Exception as error:
        raise CheckpointNotFound(
            f"model: {model!r} is no folder here and cannot be fetched from the hub "
            f"({type(error).__name__}: {error}); give a local path, or download it first",
            param="model",
        ) from error


def _read_file(
    folder: Path, config: EngineConfig, plugins: Plugins | None
) -> tuple[Path, dict[str, Any], str]:
    """→ the configuration's file, its (equivalent) config.json content, and the checkpoint's weight
    loader
    """
    name = None
    if plugins is not None:
        formats = plugins["checkpoint_format"]
        name = config_format(formats, config.config_format, folder)
    if name is None:
        file = folder / "config.json"
        if not file.is_file():
            auto = plugins is not None and config.config_format == AUTO
            others = formats.entries() if auto else []
            files = ["config.json", *(formats.load(entry.name).config_file for entry in others)]
            raise CheckpointNotFound(f"model: {folder} has no {' or '.join(files)}", param="model")
        return file, read_object(file), ModelConfig.load_format
    checkpoint_format = formats.load(name)
    with formats.calling(name, "read_config"):
        raw = checkpoint_format.read_config(folder)
        if not isinstance(raw, dict):
            raise TypeError(f"it returned {shown(raw)}, which is no dict")
    return folder / checkpoint_format.config_file, raw, checkpoint_format.load_format


def _read_config(
    file: Path, raw: dict[str, Any], plugins: Plugins | None
) -> tuple[Any, str | None, Any]:
    """→ configuration; and if it is the text part's, architecture and configuration of the
    whole"""

    def read(raw: dict[str, Any], architecture: str | None) -> Any:
        """architecture: of the model; None: the content's."""
        own = _architecture(file, raw)
        model_type: str | None = raw.get("model_type")
        kinds = _kinds_of_fields(plugins, architecture or own, model_type)
        check_fields(file, raw, kinds)
        if plugins is not None and model_type and model_type in plugins["config"]:
            config = plugin_config(file, raw, plugins["config"])
            if not isinstance(plugins["config"].load(model_type), PlainConfig):
                return config
        else:
            config = checkpoint_config(file, raw)
        model = None if plugins is None else _model_class(plugins, architecture or own)
        ignored: frozenset[str] = getattr(model, "ignored_fields", frozenset())
        drop_strays(config, raw, ignored | COMMON - (kinds.keys() - SHARED.keys()))
        return config

    whole = _architecture(file, raw)
    part = None if plugins is None or whole is None else _text_part(plugins["model"], whole)
    if part is None:
        return read(raw, None), None, None
    check_fields(file, raw)
    types = {} if plugins is None else plugins["model"].text_types
    model_type = raw.get("model_type") or ""
    registered = plugins is not None and bool(model_type) and model_type in plugins["config"]
    config, outer = text_config(file, raw, read, part, types, registered)
    return config, whole, outer


def _text_part(models: Any, architecture: str) -> str | None:
    """Return as what the text part of an architecture is served (see `Registry.text_part`)."""
    part: str | None = models.text_part(architecture)
    if part is None and architecture not in models and models.refusal(architecture) is None:
        return "" if is_multimodal(architecture) else None
    return part


def _architecture(file: Path, raw: dict[str, Any]) -> str | None:
    """Return config.json's first architecture. Raises ConfigError for a wrong field."""
    for name in ("architectures", "model_type"):
        SHARED[name].check(file, raw, name)
    return next(iter(raw.get("architectures") or ()), None)


def _kinds_of_fields(
    plugins: Plugins | None, architecture: str | None, model_type: str | None
) -> Mapping[str, FieldKind]:
    """Return the kinds of common fields, the model class's, and the configuration class's, which
    takes precedence.
    """
    if plugins is None:
        return SHARED
    kinds = dict(SHARED)
    if (model := _model_class(plugins, architecture)) is not None:
        kinds |= declared_fields(model)
    if model_type and model_type in plugins["config"]:
        kinds |= declared_fields(plugins["config"].load(model_type))
    return kinds


def _model_class(plugins: Plugins, architecture: str | None) -> Any:
    """Return an architecture's registered class, or the fallback; None if refused, or served by its
    text part.
    """
    models = plugins["model"]
    if architecture is None or architecture in models:
        return models.load(architecture) if architecture else None
    elsewhere = models.refusal(architecture) or _text_part(models, architecture) is not None
    return None if elsewhere or FALLBACK not in models else models.load(FALLBACK)


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
