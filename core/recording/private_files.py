"""Folders and files with tenants' data: for their owner alone, whatever the umask."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("jackfield.files")
FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS = 0o077


def make_private_folder(path: Path) -> None:
    """Create a folder that is our own, or tighten its mode. Raises OSError.

    Parents that are missing are created as usual.
    """
    path.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    tighten(path)


def make_given_folder(path: Path, name: str) -> None:
    """Create a folder that an option names. One that is there stays as it is, for it may hold other
    things: if others may enter it, a warning says so. Raises OSError."""
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
    """Take the access of others from a file or folder, or warn that it cannot be taken. Raises
    OSError if there is none."""
    mode = path.stat().st_mode
    if not mode & _OTHERS:
        return
    try:
        path.chmod(mode & ~_OTHERS & 0o7777)
    except PermissionError:
        logger.warning("other users have access to %s (mode %o)", path, mode & 0o7777)


def private_opener(path: str, flags: int) -> int:
    """Open a file; a new one has FILE_MODE. For `open(…, opener=private_opener)`."""
    return os.open(path, flags, FILE_MODE)
