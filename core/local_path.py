"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def local_path(text: str) -> Path:
    """Return a path with `~` and `~user` replaced by home folders; an unknown user's stays as it
    is, where `Path.expanduser` raises RuntimeError."""
    return Path(os.path.expanduser(text))


def is_folder(path: Path) -> bool:
    """Whether a folder is there; False, where `Path.is_dir` raises OSError, for too long a name."""
    return os.path.isdir(path)


def is_file(path: Path) -> bool:
    """Whether a file is there; False for too long a name."""
    return os.path.isfile(path)
