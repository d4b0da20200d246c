"""Reads lines from a terminal, with editing and a persistent history."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType

from ...core.local_path import local_path

MOST_LINES = 1000
"""Most lines of the history."""


class LineEditing:
    """On a terminal, arrow keys edit and recall lines if this Python has readline."""

    def __init__(self, history_file: str | None) -> None:
        """history_file: private file of earlier lines; None: none."""
        self._readline = _readline() if sys.stdin.isatty() else None
        self._file = local_path(history_file) if history_file else None
        if self._readline is None or self._file is None:
            return
        with contextlib.suppress(OSError, UnicodeDecodeError):  # None yet, or not ours to read.
            self._readline.read_history_file(self._file)
        self._readline.set_history_length(MOST_LINES)

    @staticmethod
    def default_file() -> str:
        folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return str(Path(folder) / "jackfield" / "chat_history")

    def read(self, prompt: str) -> str:
        """Return the next line. Raises EOFError."""
        line = input(prompt)
        if self._readline is not None and self._file is not None and line.strip():
            with contextlib.suppress(OSError):  # A conversation is worth more than its history.
                self._write(self._readline, self._file)
        return line

    @staticmethod
    def _write(readline: ModuleType, file: Path) -> None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
        file.chmod(0o600)
        readline.write_history_file(file)


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Builds of Python may lack it.
        return None
    return readline
