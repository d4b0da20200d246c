"""One end of the connection between an engine and a front end: frames in, frames out."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from .frames import BadFrame, FrameReader, ToEngine, ToFront, encode

logger = logging.getLogger("jackfield.remote")
T = TypeVar("T")
HIGH_WATER = 4 << 20
"""Bytes that wait to be written, from which on the other side is slow."""


class Channel(asyncio.Protocol, Generic[T]):
    """Made for each connection; what comes is of type `T`.

    `received` gets each message, `lost` is called once, when the connection has ended; `ready` when
    a slow other side has caught up. A message that is none, or that `received` fails on, ends the
    connection, and nothing but it.
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
        """The other side does not read as fast as we write."""
        self.closed = False
        self._reader: FrameReader[T] = FrameReader(kind)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses other users, whatever the folder's permissions say."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it.
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        user = peer_user(transport)
        if user != os.getuid():
            logger.warning("refused a connection of user %s", user)
            self.abort()
        elif self.opened is not None:
            self.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        try:
            for message in self._reader.feed(data):
                if self.received is not None and not self.closed:
                    self.received(message)
        except BadFrame as error:
            logger.error("a connection is closed, for what came is no frame: %s", error)
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

    def send(self, message: ToEngine | ToFront) -> None:
        """Raises TooLarge and ValueError; a connection that has ended swallows it."""
        data = encode(message)
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    def close(self) -> None:
        """End it once everything is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it now."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


def peer_user(transport: asyncio.BaseTransport) -> int:
    """The user of the process at the other end of a Unix socket."""
    number = transport.get_extra_info("socket").fileno()
    with socket.socket(fileno=os.dup(number)) as twin:
        told = twin.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", told)
    return int(user)
