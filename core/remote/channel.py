"""One end of the connection between an engine and a front end: frames in, frames out."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from .frames import BadFrame, FrameReader, encode

logger = logging.getLogger("jackfield.remote")
T = TypeVar("T")
HIGH_WATER = 4 << 20
"""Unwritten bytes from which the other side counts as slow."""


class Channel(asyncio.Protocol, Generic[T]):
    """An asyncio protocol that receives messages of type `T`.

    `received` gets messages, `lost` is called once at the end, `ready` when a slow side has caught
    up. An invalid message, or a failing `received`, ends only the connection.
    """

    def __init__(
        self,
        kind: Any,
        *,
        opened: Callable[[Channel[T]], object] | None = None,
        received: Callable[[T], None] | None = None,
        lost: Callable[[], None] | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self.opened = opened
        self.received = received
        self.lost = lost
        self.ready = ready
        self.paused = False
        """The other side is slow."""
        self.closed = False
        self._reader: FrameReader[T] = FrameReader(kind)
        self._transport: asyncio.Transport | None = None
        self._proved = False
        """Whether the other side was known before."""

    async def attach(self, connection: socket.socket) -> None:
        """Use a connected Unix socket, or a proved TCP one."""
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        if connection.family == socket.AF_UNIX:
            await loop.create_unix_connection(lambda: self, sock=connection)
        else:
            self._proved = True
            await loop.create_connection(lambda: self, sock=connection)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse other users, whatever the folder's permissions."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass.
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        if not self._proved and (user := peer_user(transport)) != os.getuid():
            logger.warning("refused a connection of user %s", user)
            self.abort()
        elif self.opened is not None:
            self.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        try:
            for message in self._reader.read_frames(data):
                if self.received is not None and not self.closed:
                    self.received(message)
        except BadFrame as error:
            logger.error("a connection is closed: invalid frame: %s", error)
            self.abort()
        except Exception:
            logger.exception("a connection is closed: a message could not be handled")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        lost, self.lost = self.lost, None
        if lost is not None:
            lost()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.ready is not None:
            self.ready()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message unless ended. Raises TooLarge and ValueError."""
        data = encode(message)
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    def close(self) -> None:
        """End after everything is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


def peer_user(transport: asyncio.BaseTransport) -> int:
    number = transport.get_extra_info("socket").fileno()
    with socket.socket(fileno=os.dup(number)) as twin:
        credentials = twin.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
