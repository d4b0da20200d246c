"""The model's configuration, from the checkpoint and the engine's options.

A checkpoint's code is never imported: `auto_map` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import EngineConfig
from ..errors import ConfigError, LoadError
from ..registry import Plugins
from .checkpoint_config import checkpoint_config, plugin_config
from .config_fields import check_fields
from .dialects import NO_DIALECTS, Dialects, read_dialects
from .generation_config import (
    NO_DEFAULTS,
    SamplingDefaults,
    read_generation_config,
    sampling_defaults,
)
from .json_file import read_object
from .multimodal.text_part import text_config

if TYPE_CHECKING:
    from .pooling_config import PoolingConfig

EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "plugins" / "models" / "embedded"
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_local_experts",
    "n_routed_experts", "shared_expert_intermediate_size", "loop_num", "total_ut_steps",
    "share_expert_dim", "n_shared_experts", "num_shared_experts",
)  # fmt: skip
"""Where config.json has one of these numbers, it is 1 to LARGEST_SIZE."""
MAY_BE_ZERO = ("num_local_experts", "n_shared_experts", "num_shared_experts")
"""Hybrid models say of an MLP that it has no experts, and mixtures that they share none."""
LARGEST_SIZE = 2**31 - 1
LENGTHS = ("max_position_embeddings", "max_seq_len", "model_max_length", "seq_length")
"""Names of the context length; the first that a configuration has."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


@dataclass(frozen=True)
class SourceConfig:
    """How the decoder of an encoder-decoder model begins."""

    decoder_start_token_id: int
    """The first token of each sequence."""
    forced_bos_token_id: int | None = None
    """The second one, unless a request gives the decoder's prompt."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never generated, besides those of a request."""


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
    sampling: SamplingDefaults = NO_DEFAULTS
    """For what requests leave open."""
    dialects: Dialects = NO_DIALECTS
    """What the checkpoint says of its model's tool calls and reasoning."""
    pooling: PoolingConfig | None = None
    """How states become vectors; None: the model generates text (`resolve_pooling` decides)."""
    text_part_of: str | None = None
    """Architecture of the checkpoint, if `architecture` is that of its text part."""
    source: SourceConfig | None = None
    """Set for an encoder-decoder model (`resolve_source`): requests have a source, of at most
    `max_model_len` tokens, besides the decoder's prompt."""

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


def resolve_model_config(config: EngineConfig, plugins: Plugins | None = None) -> ModelConfig:
    """Read the checkpoint's config.json, with a configuration class of `plugins` where one has its
    model type. Raises LoadError (no checkpoint) and ConfigError."""
    folder = checkpoint_folder(config.model, config.revision)
    hf_config, text_part_of = _read_config(folder, config.hf_overrides, plugins)
    architectures = getattr(hf_config, "architectures", None) or []
    if not architectures:
        raise ConfigError(f"model: {folder}/config.json names no architecture", param="model")
    if not isinstance(getattr(hf_config, "vocab_size", None), int):
        raise ConfigError(f"model: {folder}/config.json gives no vocab_size", param="model")
    _check_sizes(folder, hf_config)
    generation = read_generation_config(folder, config)
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        raise ConfigError(
            f"model: {folder}/config.json has quantization_config {quantization!r}, which is no "
            "JSON object",
            param="quantization_config",
        )
    return ModelConfig(
        path=folder,
        architecture=architectures[0],
        hf_config=hf_config,
        dtype=_resolve_dtype(config, hf_config),
        max_model_len=_resolve_length(config, hf_config),
        vocab_size=int(hf_config.vocab_size),
        eos_token_ids=_eos_token_ids(hf_config, generation),
        sampling=sampling_defaults(generation, config),
        dialects=read_dialects(folder),
        quantization_config=quantization,
        text_part_of=text_part_of,
    )


def checkpoint_folder(model: str, revision: str | None = None) -> Path:
    """Return the folder of a local path, of a hub name in the hub's cache, or of the embedded model
    (empty)."""
    if not model:
        if not (EMBEDDED_MODEL / "config.json").is_file():
            raise LoadError("the embedded model is missing from this installation", param="model")
        return EMBEDDED_MODEL
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise LoadError(f"model: {folder} has no config.json", param="model")
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise LoadError(
            f"model: {model!r} is neither a folder here nor a hub name (owner/name)", param="model"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_PATTERNS))
    except Exception as error:
        raise LoadError(
            f"model: {model!r} is no folder here and cannot be fetched from the hub "
            f"({type(error).__name__}: {error}); give a local path, or download it first",
            param="model",
        ) from error


def _read_config(
    folder: Path, overrides: dict[str, Any] | None, plugins: Plugins | None
) -> tuple[Any, str | None]:
    """→ configuration, and the checkpoint's architecture if it is that of the text part alone"""

    def read(raw: dict[str, Any]) -> Any:
        check_fields(folder / "config.json", raw)
        model_type = raw.get("model_type")
        if plugins is not None and isinstance(model_type, str) and model_type in plugins["config"]:
            return plugin_config(folder, raw, plugins["config"])
        return checkpoint_config(folder, raw)

    raw = read_object(folder / "config.json") | (overrides or {})
    check_fields(folder / "config.json", raw)
    whole = next(iter(raw.get("architectures") or ()), None)
    part = None if plugins is None or whole is None else plugins["model"].text_part(whole)
    if part is None:
        return read(raw), None
    return text_config(folder, raw, read, part), whole


def _check_sizes(folder: Path, hf_config: Any) -> None:
    sizes = {name: getattr(hf_config, name, None) for name in SIZES}
    for name, value in sizes.items():
        least = 0 if name in MAY_BE_ZERO else 1
        if isinstance(value, int) and not least <= value <= LARGEST_SIZE:
            raise ConfigError(
                f"model: {folder}/config.json has {name} {value}, which is no size of a model",
                param="model",
            )
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ConfigError(
            f"model: {folder}/config.json has num_attention_heads {heads}, which is no multiple of "
            f"num_key_value_heads {kv_heads}",
            param="model",
        )


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


def _resolve_length(config: EngineConfig, hf_config: Any) -> int:
    """Return the context length: the model's own, or `max_model_len` if the model reaches that far.

    `max_position_embeddings` already counts a scaled rope, but for a linear one, and for a yarn one
    whose original length equals it. A dynamic rope may be stretched, but is so only on demand: it
    changes what the model says about short texts too.
    """
    lengths = (getattr(hf_config, name, None) for name in LENGTHS)
    stated = next((int(length) for length in lengths if length), None)
    own = stated or 2048
    # A model that states no length keeps a state, which has none.
    reach = stated or LARGEST_SIZE
    rope = rope_parameters(hf_config)
    factor = float(rope.get("factor") or 1.0)
    if rope["rope_type"] == "yarn":
        own = reach = max(own, int((rope.get("original_max_position_embeddings") or own) * factor))
    elif rope["rope_type"] == "linear":
        own = reach = int(own * factor)
    elif rope["rope_type"] == "dynamic":
        reach = int(own * factor)
    if config.max_model_len is None:
        return own
    if config.max_model_len > reach:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than this model's {reach}; lower it, "
            "or scale its rope with hf_overrides",
            param="max_model_len",
        )
    return config.max_model_len


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """Return the rope parameters, which checkpoints call `rope_parameters`, or `rope_scaling` and
    `rope_theta`."""
    rope = dict(
        getattr(hf_config, "rope_parameters", None)
        or getattr(hf_config, "rope_scaling", None)
        or {}
    )
    rope.setdefault("rope_theta", getattr(hf_config, "rope_theta", None) or 10000.0)
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _eos_token_ids(hf_config: Any, generation: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens, without ids that are not in the vocabulary."""
    token_ids: list[Any] = []
    for value in (getattr(hf_config, "eos_token_id", None), generation.get("eos_token_id")):
        token_ids += value if isinstance(value, list) else [value]
    return frozenset(t for t in token_ids if isinstance(t, int) and 0 <= t < hf_config.vocab_size)
