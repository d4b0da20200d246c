"""Reads sentence-transformers' files in a checkpoint: modules.json and the files that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ..errors import ConfigError, LoadError
from ..pooling_params import PoolingType
from .json_file import json_if_there, object_if_there

POOLING_MODES: dict[str, PoolingType] = {
    "cls": "CLS", "cls_token": "CLS", "mean": "MEAN", "mean_tokens": "MEAN", "lasttoken": "LAST",
}  # fmt: skip
"""Names in 1_Pooling/config.json."""
DENSE_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu"}
"""torch's class name → `core.nn.encoder`'s."""


@dataclass(frozen=True)
class Projection:
    """A linear layer after the pooling, in a folder of its own."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str | None


class SentenceTransformer(msgspec.Struct):
    pooling_type: PoolingType | None = None
    """None: no sentence-transformers model."""
    normalize: bool = False
    projections: tuple[Projection, ...] = ()
    max_length: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = {}


def read_sentence_transformer(folder: Path) -> SentenceTransformer:
    """Read the files. Raises ConfigError for unsupported modules that change vectors.

    Prompts of config_sentence_transformers.json are the caller's to write, as in vLLM.
    """
    files = SentenceTransformer()
    prompts = object_if_there(folder / "config_sentence_transformers.json").get("prompts")
    if isinstance(prompts, dict):
        files.prompts = {n: text for n, text in prompts.items() if isinstance(text, str)}
    for path in sorted(folder.glob("sentence_*_config.json")):
        settings = object_if_there(path)
        length = settings.get("max_seq_length")
        files.max_length = length if isinstance(length, int) and length > 0 else None
        files.lower_case = settings.get("do_lower_case") is True
    modules = json_if_there(folder / "modules.json") or []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise LoadError(f"model: {folder}/modules.json is no list of modules", param="model")
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Normalize":
            files.normalize = True
        elif kind == "Pooling":
            files.pooling_type = _pooling_mode(_inside(folder, module))
        elif kind == "Dense" and not files.normalize:
            files.projections += (_projection(_inside(folder, module)),)
        elif kind not in ("Transformer", "CrossEncoder"):
            raise ConfigError(
                f"model: {folder}/modules.json has a module {kind!r}, which is not supported "
                "there (there are: Transformer, Pooling, Dense, Normalize, in this order)",
                param="model",
            )
    return files


def _inside(folder: Path, module: Mapping[str, Any]) -> Path:
    """Return a module's folder. Raises LoadError if outside."""
    path = str(module.get("path", ""))
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise LoadError(f"modules.json names {path!r}, which is not in its own folder")
    return folder / path


def _projection(folder: Path) -> Projection:
    settings = object_if_there(folder / "config.json")
    size_in, size_out = settings.get("in_features"), settings.get("out_features")
    named = str(settings.get("activation_function", "Identity"))
    activation = named.rpartition(".")[2]
    if not isinstance(size_in, int) or not isinstance(size_out, int):
        raise ConfigError(
            f"model: {folder}/config.json gives no in_features and out_features", param="model"
        )
    if activation not in DENSE_ACTIVATIONS:
        raise ConfigError(
            f"model: {folder}/config.json names the activation {named!r}, which is not supported "
            f"(there are: {', '.join(DENSE_ACTIVATIONS)})",
            param="model",
        )
    bias = bool(settings.get("bias", True))
    return Projection(folder, size_in, size_out, bias, DENSE_ACTIVATIONS[activation])


def _pooling_mode(folder: Path) -> PoolingType:
    settings = object_if_there(folder / "config.json")
    mode = settings.get("pooling_mode")
    on = {str(mode)} if mode else set()
    on |= {
        key.removeprefix("pooling_mode_")
        for key, value in settings.items()
        if key.startswith("pooling_mode_") and value is True
    }
    kinds = {POOLING_MODES.get(name) for name in on}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        raise ConfigError(
            f"model: {folder}/config.json pools by {', '.join(sorted(on)) or 'nothing'}, "
            "which is not supported (there are: cls_token, mean_tokens, lasttoken)",
            param="model",
        )
    return kind
