"""Processes that become members: started ahead of the engine where that saves time.

Imports nothing large: a program may call `start_ahead` before it imports the engine, and the new
processes import meanwhile what they need.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import NamedTuple

from ..remote.processes import describe_end, spawn

PROGRAM = "jackfield.core.data_parallel.member_program"


class LocalProcess:
    """A process of this host."""

    where = ""

    def __init__(self, spawned: SpareProcess) -> None:
        self.popen, self.connection = spawned

    def ending(self) -> str | None:
        """By its status."""
        status = self.popen.poll()
        return None if status is None else describe_end(status)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()

    async def release(self) -> None:
        """Nothing: its devices are free."""


class LocalHosts:
    """This host."""

    async def start(self, number: int) -> LocalProcess:
        """Start a process, or take one that was started ahead."""
        return LocalProcess(take())


class SpareProcess(NamedTuple):
    """A process that waits for its Setup."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


_spares: list[SpareProcess] = []
"""Of this process, and of no engine yet. They end with it."""


def start_ahead(count: int) -> None:
    """Start processes until `count` are there that no engine uses."""
    while len(_spares) < count:
        _spares.append(_spawn())


def take() -> SpareProcess:
    """Return a process that no one else gets, started ahead or now."""
    while _spares:
        if (spare := _spares.pop()).process.poll() is None:
            return spare
        spare.connection.close()
    return _spawn()


def _spawn() -> SpareProcess:
    own, other = socket.socketpair()
    with other:
        return SpareProcess(spawn(PROGRAM, (other.fileno(),)), own)
