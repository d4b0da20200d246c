"""A checkpoint's files that hold JSON, most of them one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import LoadError


def read_object(path: Path) -> dict[str, Any]:
    """Raises LoadError where it holds something else, or cannot be read."""
    read = _read(path)
    if not isinstance(read, dict):
        raise LoadError(f"model: {path} holds no JSON object", param="model")
    return read


def json_if_there(path: Path) -> Any:
    """None where there is no such file. Raises LoadError where it cannot be read."""
    return _read(path) if path.is_file() else None


def object_if_there(path: Path) -> dict[str, Any]:
    """The same, but empty where there is no file, or something else in it."""
    read = json_if_there(path)
    return read if isinstance(read, dict) else {}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"model: {path} cannot be read: {error}", param="model") from error
