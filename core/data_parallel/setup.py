"""First frame of a member's connection."""

from __future__ import annotations

import socket

import msgspec

from ..config import EngineConfig
from ..remote.frames import HEAD


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    config: EngineConfig
    """Unresolved."""
    member: int
    environment: dict[str, str]
    """Variables to set before devices are used."""
    plugins: tuple[str, ...]
    """Entry points of the external plugins to load."""
    log_level: int


def receive_setup(connection: socket.socket) -> Setup:
    """Read exactly the first frame. Raises EOFError, msgspec's errors."""
    size = int.from_bytes(_receive(connection, HEAD), "little")
    return msgspec.msgpack.decode(_receive(connection, size), type=Setup)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError("the connection has ended")
    return data
