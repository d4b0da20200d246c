"""What the process of a member is given first: the first frame of its connection."""

from __future__ import annotations

import socket

import msgspec

from ..config import EngineConfig
from ..remote.frames import HEAD


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """How to start a member."""

    config: EngineConfig
    """Not resolved."""
    member: int
    environment: dict[str, str]
    """Variables to set before a device is looked at."""
    plugins: tuple[str, ...]
    """Entry points of the plugins from outside that the first process has loaded: those, and no
    others."""
    log_level: int


def receive_setup(connection: socket.socket) -> Setup:
    """Read the first frame, and nothing beyond it. Raises EOFError, msgspec's errors."""
    size = int.from_bytes(_receive(connection, HEAD), "little")
    return msgspec.msgpack.decode(_receive(connection, size), type=Setup)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError("the connection has ended")
    return data
