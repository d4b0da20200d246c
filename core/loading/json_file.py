"""Reads a checkpoint's JSON files, refusing unfetched ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import LoadError

LFS_POINTER = b"version https://git-lfs.github.com/"
"""Beginning of a Git LFS pointer."""


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises LoadError."""
    read = _read(path)
    if not isinstance(read, dict):
        raise LoadError(f"model: {path} holds no JSON object", param="model")
    return read


def json_if_there(path: Path) -> Any:
    """Read a JSON file, or None. Raises LoadError if unreadable."""
    return _read(path) if path.is_file() else None


def object_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if missing or something else."""
    read = json_if_there(path)
    return read if isinstance(read, dict) else {}


def check_fetched(path: Path) -> None:
    """Raise LoadError for a Git LFS pointer, left by a clone without git-lfs."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise LoadError(
                f"model: {path} is a pointer of Git LFS, not the file itself; fetch it with "
                "`git lfs pull` in that folder",
                param="model",
            )


def _read(path: Path) -> Any:
    try:
        check_fetched(path)
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"model: {path} cannot be read: {error}", param="model") from error


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text and key of a JSON value."""
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): with_texts(item, change) for name, item in value.items()}
    return change(value) if isinstance(value, str) else value
