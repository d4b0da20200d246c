"""Processes for members, started ahead to save time.

Imports nothing large: a program may call `start_ahead` before it imports the engine.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import NamedTuple

from ..remote.processes import describe_end, spawn

PROGRAM = "jackfield.core.data_parallel.member_program"


class LocalProcess:
    where = ""

    def __init__(self, spawned: SpareProcess) -> None:
        self.popen, self.connection = spawned

    def ending(self) -> str | None:
        status = self.popen.poll()
        return None if status is None else describe_end(status)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()

    async def release(self) -> None:
        """Nothing: its devices are free."""


class LocalHosts:
    async def start(self, number: int) -> LocalProcess:
        """Start a process, or use a spare one."""
        return LocalProcess(take())


class SpareProcess(NamedTuple):
    """Waits for its Setup."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


_spares: list[SpareProcess] = []
"""This process's spares; they end with it."""


def start_ahead(count: int) -> None:
    """Start processes until `count` are spare."""
    while len(_spares) < count:
        _spares.append(_spawn())


def take() -> SpareProcess:
    """Return a spare process, or start one."""
    while _spares:
        if (spare := _spares.pop()).process.poll() is None:
            return spare
        spare.connection.close()
    return _spawn()


def _spawn() -> SpareProcess:
    own, other = socket.socketpair()
    with other:
        return SpareProcess(spawn(PROGRAM, (other.fileno(),)), own)
