"""Reads JSON files of a checkpoint, refuses those that were not fetched, and maps their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import LoadError

LFS_POINTER = b"version https://git-lfs.github.com/"
"""What a file begins with that Git LFS put in the place of a large one."""


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises LoadError if the file contains something else, or cannot be
    read."""
    read = _read(path)
    if not isinstance(read, dict):
        raise LoadError(f"model: {path} holds no JSON object", param="model")
    return read


def json_if_there(path: Path) -> Any:
    """Read a JSON file; None if it does not exist. Raises LoadError if it cannot be read."""
    return _read(path) if path.is_file() else None


def object_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file does not exist or contains something else."""
    read = json_if_there(path)
    return read if isinstance(read, dict) else {}


def check_fetched(path: Path) -> None:
    """Raise LoadError if Git LFS has left a pointer in the place of a file, as a clone without
    git-lfs does."""
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
    """Return a JSON value with each text in it, and each key, as `change` gives it."""
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): with_texts(item, change) for name, item in value.items()}
    return change(value) if isinstance(value, str) else value
