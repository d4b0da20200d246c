"""What a checkpoint says about its model, resolved against the engine's options.

A checkpoint's code is never imported: `auto_map` is refused unless the model type is known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import EngineConfig
from ..errors import ConfigError, LoadError

EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "plugins" / "models" / "embedded"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's model, as the worker and the engine need to know it."""

    path: Path
    """Folder of the checkpoint."""
    architecture: str
    hf_config: Any
    """The `transformers` configuration object."""
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    quantization_config: dict[str, Any] | None = None

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


def resolve_model_config(config: EngineConfig) -> ModelConfig:
    """Read the checkpoint's config.json. Raises LoadError (no checkpoint) and ConfigError."""
    folder = checkpoint_folder(config.model, config.revision)
    hf_config = _read_config(folder, config.hf_overrides)
    architectures = getattr(hf_config, "architectures", None) or []
    if not architectures:
        raise ConfigError(f"model: {folder}/config.json names no architecture", param="model")
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization is not None or config.quantization is not None:
        method = config.quantization or dict(quantization or {}).get("quant_method", "unknown")
        raise ConfigError(
            f"quantization: {method!r} checkpoints are not supported yet", param="quantization"
        )
    return ModelConfig(
        path=folder,
        architecture=architectures[0],
        hf_config=hf_config,
        dtype=_resolve_dtype(config, hf_config),
        max_model_len=_resolve_length(config, hf_config),
        vocab_size=int(hf_config.vocab_size),
        eos_token_ids=_eos_token_ids(folder, hf_config),
    )


def checkpoint_folder(model: str, revision: str | None = None) -> Path:
    """A local folder as it is; a hub name through the hub's cache; empty: the embedded model."""
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


def _read_config(folder: Path, overrides: dict[str, Any] | None) -> Any:
    from transformers import AutoConfig

    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise LoadError(f"model: {folder}/config.json cannot be read: {error}") from error
    if overrides:
        raw.update(overrides)
    model_type = raw.get("model_type")
    raw.pop("auto_map", None)
    try:
        known = dict(raw)
        known.pop("model_type", None)
        return AutoConfig.for_model(model_type, **known)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model: model_type {model_type!r} is not known here ({error}); Jackfield never runs "
            "code from a checkpoint (trust_remote_code): install a plugin that registers the model",
            param="model",
        ) from error


def _resolve_dtype(config: EngineConfig, hf_config: Any) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if config.device == "cpu":
        return torch.float32
    stored = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
    if isinstance(stored, str):
        stored = DTYPES.get(stored.removeprefix("torch."))
    return stored if stored in (torch.float16, torch.bfloat16) else torch.bfloat16


def _resolve_length(config: EngineConfig, hf_config: Any) -> int:
    """The context length. `max_position_embeddings` already counts a scaled rope, but for older
    configurations whose original length equals it."""
    limit = int(getattr(hf_config, "max_position_embeddings", 0) or 2048)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if factor and rope.get("rope_type") == "yarn" and original:
        limit = max(limit, int(original * factor))
    elif factor and rope.get("rope_type") == "linear":
        limit = int(limit * factor)
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than this model's {limit}; lower it, "
            "or scale its rope with hf_overrides",
            param="max_model_len",
        )
    return config.max_model_len


def _eos_token_ids(folder: Path, hf_config: Any) -> frozenset[int]:
    found: set[int] = set()

    def collect(value: Any) -> None:
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(value)

    collect(getattr(hf_config, "eos_token_id", None))
    generation = folder / "generation_config.json"
    if generation.is_file():
        collect(json.loads(generation.read_text()).get("eos_token_id"))
    return frozenset(found)
