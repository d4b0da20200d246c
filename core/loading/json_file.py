"""Files of a checkpoint that hold one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import LoadError


def read_object(path: Path) -> dict[str, Any]:
    """Raises LoadError where it holds something else, or cannot be read."""
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"model: {path} cannot be read: {error}", param="model") from error
    if not isinstance(read, dict):
        raise LoadError(f"model: {path} holds no JSON object", param="model")
    return read
