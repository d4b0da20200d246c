"""Which registered checkpoint format reads the files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError, PluginError
from .registered import Registry

AUTO = "auto"
USUAL = "hf"
"""Option value for config.json or tokenizer.json, without a format."""


def config_format(registry: Registry[Any], name: str, folder: Path) -> str | None:
    """Return the format of a checkpoint's configuration; None: config.json.

    name: option config_format. Raises ConfigError.
    """
    usual = (folder / "config.json").is_file()
    return _chosen(registry, "config_format", name, usual, folder, "config_file")


def tokenizer_format(registry: Registry[Any], name: str, folder: Path) -> str | None:
    """Return the format of a checkpoint's tokenizer; None: tokenizer.json, or `transformers`'
    files.

    name: option tokenizer_mode. Raises ConfigError.
    """
    usual = (folder / "tokenizer.json").is_file()
    return _chosen(registry, "tokenizer_mode", name, usual, folder, "tokenizer_file")


def _chosen(
    registry: Registry[Any], option: str, name: str, usual: bool, folder: Path, file: str
) -> str | None:
    if name == USUAL or (name == AUTO and usual):
        return None
    if name != AUTO:
        try:
            registry.load(name)
        except PluginError as error:
            raise ConfigError(
                f"{option}: {error}; or {AUTO!r}, or {USUAL!r} for the usual files", param=option
            ) from error
        return name
    names = (entry.name for entry in registry.entries())
    return next((n for n in names if (folder / getattr(registry.load(n), file)).is_file()), None)
