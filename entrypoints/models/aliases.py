"""Aliases: names of one's own for models, in a file of the user's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...core.errors import ConfigError, shown
from ...core.local_path import local_path

NAME = re.compile(r"[A-Za-z0-9][\w.:-]{0,127}")


def aliases_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return local_path(folder) / "jackfield" / "aliases.json"


def read_aliases() -> dict[str, str]:
    """Return alias → model. Raises ConfigError if the file cannot be read."""
    path = aliases_file()
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"aliases: {path} cannot be read: {error}; mend or remove it") from None


def set_alias(name: str, model: str) -> None:
    """Raises ConfigError for a name that looks like a path or a hub name."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"alias: a name has letters, digits, '.', ':', '_' and '-', got {shown(name)}"
        )
    with _changing() as aliases:
        aliases[name] = model


def remove_alias(name: str) -> bool:
    """Return whether there was one."""
    with _changing() as aliases:
        return aliases.pop(name, None) is not None


@contextlib.contextmanager
def _changing() -> Iterator[dict[str, str]]:
    """Yield the aliases; write them at the end, in one piece."""
    path = aliases_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "aliases.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        aliases = read_aliases()
        yield aliases
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(aliases.items())))))
        new.replace(path)
