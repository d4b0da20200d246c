"""A checkpoint's configuration file: which one it is, and what is read from it.

A checkpoint's code is never imported: `auto_map` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import CheckpointNotFound, shown
from ..protocols.field_kinds import FieldKind, declared_fields
from ..protocols.models import PlainConfig
from ..registration.architecture import FALLBACK
from ..registration.checkpoint_formats import AUTO, config_format
from ..registry import Plugins
from .checkpoint_config import SOMETIMES, checkpoint_config, drop_strays, plugin_config
from .config_fields import ALIASES, SHARED, check_fields
from .json_file import read_object
from .text_part import is_multimodal, text_config

SAFETENSORS = "safetensors"
"""The weight loader of checkpoints in the usual form."""
COMMON = (SHARED.keys() | SOMETIMES | ALIASES) - {"head_dim"}
"""Fields that code for many families reads, whether or not a family has them. Models of
`transformers` read head_dim, too, but for those whose class here has it in `ignored_fields`."""


def read_config_file(
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
        return file, read_object(file), SAFETENSORS
    checkpoint_format = formats.load(name)
    with formats.calling(name, "read_config"):
        raw = checkpoint_format.read_config(folder)
        if not isinstance(raw, dict):
            raise TypeError(f"it returned {shown(raw)}, which is no dict")
    return folder / checkpoint_format.config_file, raw, checkpoint_format.load_format


def read_config(
    file: Path, raw: dict[str, Any], plugins: Plugins | None
) -> tuple[Any, str | None, Any]:
    """→ configuration; and if it is the text part's, architecture and configuration of the
    whole"""

    def read(raw: dict[str, Any], architecture: str | None) -> Any:
        """architecture: of the model; None: the content's."""
        own = _architecture(file, raw)
        model_type: str | None = raw.get("model_type")
        kinds = kinds_of_fields(plugins, architecture or own, model_type)
        check_fields(file, raw, kinds)
        if plugins is not None and model_type and model_type in plugins["config"]:
            config = plugin_config(file, raw, plugins["config"])
            if not isinstance(plugins["config"].load(model_type), PlainConfig):
                return config
        else:
            config = checkpoint_config(file, raw)
        model = None if plugins is None else model_class(plugins, architecture or own)
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


def kinds_of_fields(
    plugins: Plugins | None, architecture: str | None, model_type: str | None
) -> Mapping[str, FieldKind]:
    """Return the kinds of common fields, the model class's, and the configuration class's, which
    takes precedence.
    """
    if plugins is None:
        return SHARED
    kinds = dict(SHARED)
    if (model := model_class(plugins, architecture)) is not None:
        kinds |= declared_fields(model)
    if model_type and model_type in plugins["config"]:
        kinds |= declared_fields(plugins["config"].load(model_type))
    return kinds


def model_class(plugins: Plugins, architecture: str | None) -> Any:
    """Return an architecture's registered class, or the fallback; None if refused, or served by its
    text part.
    """
    models = plugins["model"]
    if architecture is None or architecture in models:
        return models.load(architecture) if architecture else None
    elsewhere = models.refusal(architecture) or _text_part(models, architecture) is not None
    return None if elsewhere or FALLBACK not in models else models.load(FALLBACK)
