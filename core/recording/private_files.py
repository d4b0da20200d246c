"""Folders and files with tenants' data: private, whatever the umask."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("jackfield.files")
FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS = 0o077


def make_private_folder(path: Path) -> None:
    """Create a private folder, or tighten its mode. Raises OSError.

    Missing parents get usual modes.
    """
    path.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    tighten(path)


def make_given_folder(path: Path, name: str) -> None:
    """Create an option's folder; warn if an existing one is open to others. Raises OSError."""
    try:
        path.mkdir(parents=True, mode=FOLDER_MODE)
    except FileExistsError:
        if (mode := path.stat().st_mode) & _OTHERS:
            logger.warning(
                "%s: other users may enter %s (mode %o); what is written in it is private, the "
                "folder becomes so by chmod 700",
                name,
                path,
                mode & 0o7777,
            )


def tighten(path: Path) -> None:
    """Remove others' access, or warn. Raises OSError."""
    mode = path.stat().st_mode
    if not mode & _OTHERS:
        return
    try:
        path.chmod(mode & ~_OTHERS & 0o7777)
    except PermissionError:
        logger.warning("other users have access to %s (mode %o)", path, mode & 0o7777)


def private_opener(path: str, flags: int) -> int:
    """Open a file, new ones with FILE_MODE, for `open(…, opener=private_opener)`."""
    return os.open(path, flags, FILE_MODE)
