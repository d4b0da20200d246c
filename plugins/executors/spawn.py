"""Starts the processes of followers, ahead of the engine that will use them where that saves time.

Imports nothing large: a program may call `start_ahead` before it imports the engine, and the new
processes import meanwhile what they need.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import NamedTuple

from .progress import Progress

MODULE = "jackfield.plugins.executors.follower"


class Spawned(NamedTuple):
    """A process that waits for its Setup."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    progress: Progress


_spares: list[Spawned] = []
"""Of this process, and of no engine yet. They end with it."""


def start_ahead(count: int) -> None:
    """Start processes until `count` are there that no engine uses."""
    while len(_spares) < count:
        _spares.append(_spawn())


def take() -> Spawned:
    """Return a process that no one else gets, started ahead or now."""
    while _spares:
        if (spare := _spares.pop()).process.poll() is None:
            return spare
        spare.connection.close()
        spare.progress.close()
    return _spawn()


def _spawn() -> Spawned:
    """Start a process with what this one imports from, and with its environment.

    Not by multiprocessing, which would import the user's script again."""
    own, other = socket.socketpair()
    progress = Progress.create()
    numbers = (other.fileno(), progress.file.fileno())
    paths = [os.path.abspath(path) for path in sys.path]
    with other:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *map(str, numbers), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=numbers,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    return Spawned(process, own, progress)
