"""Starts followers' processes, ahead of their engine to save time.

Imports nothing large: a program may call `start_ahead` before it imports the engine, so that the
new processes import in parallel.
"""

from __future__ import annotations

import os
import socket
import subprocess
from typing import NamedTuple

from ...core.remote.processes import spawn
from .progress import Progress

MODULE = "jackfield.plugins.executors.follower"
NUMBERING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables that number devices; a process keeps their initial values."""


class SpareProcess(NamedTuple):
    """A process that waits for its Setup."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    progress: Progress
    numbering: tuple[str | None, ...]
    """[len(NUMBERING)] Their values at its start."""


_spares: list[SpareProcess] = []
"""This process's spares; they end with it."""


def start_ahead(count: int) -> None:
    """Start processes until `count` are spare."""
    while len(_spares) < count:
        _spares.append(_spawn())


def take() -> SpareProcess:
    """Return a spare process, or start one."""
    while _spares:
        spare = _spares.pop()
        alive = spare.process.poll() is None
        if alive and spare.numbering == _numbering():
            return spare
        if alive:
            # The program has chosen other devices since.
            spare.process.kill()
            spare.process.wait()
        spare.connection.close()
        spare.progress.close()
    return _spawn()


def _spawn() -> SpareProcess:
    own, other = socket.socketpair()
    progress = Progress.create()
    with other:
        process = spawn(MODULE, (other.fileno(), progress.file.fileno()))
    return SpareProcess(process, own, progress, _numbering())


def _numbering() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in NUMBERING)
