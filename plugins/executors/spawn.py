"""Starts the processes of followers, ahead of the engine that will use them where that saves time.

Imports nothing large: a program may call `start_ahead` before it imports the engine, and the new
processes import meanwhile what they need.
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
"""Variables that say which device has which number. A process keeps those that it began with."""


class SpareProcess(NamedTuple):
    """A process that waits for its Setup."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    progress: Progress
    numbering: tuple[str | None, ...]
    """[len(NUMBERING)] What it began with."""


_spares: list[SpareProcess] = []
"""Of this process, and of no engine yet. They end with it."""


def start_ahead(count: int) -> None:
    """Start processes until `count` are there that no engine uses."""
    while len(_spares) < count:
        _spares.append(_spawn())


def take() -> SpareProcess:
    """Return a process that no one else gets, started ahead or now."""
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
