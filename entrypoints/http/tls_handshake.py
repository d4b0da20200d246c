"""TLS handshakes, counted and timed as connections are."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import cast

from .connections import Connection, Connections

logger = logging.getLogger("jackfield.http")
SHUTDOWN_SECONDS = 5.0
"""Seconds for a client to agree to a TLS connection's end."""
NO_LIMIT = 1e6
"""Stands for no limit, in seconds."""


class Handshake(asyncio.Protocol):
    """A TLS connection before its handshake, counted as idle.

    The event loop's own TLS listener shows a connection only afterwards, so unfinished handshakes
    would be bounded neither in number nor by `--timeout-header`.
    """

    idle = True

    def __init__(
        self,
        tls: ssl.SSLContext,
        open: Connections,
        connection: Callable[[], Connection],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._tls = tls
        self._open = open
        self._connection = connection
        self._loop = loop
        self._received: list[bytes] = []
        """Received before `start_tls` began, then decrypted before it returned."""
        self._has_begun = False
        self._lost = False
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]

    def evict(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._open.admit(self):
            self._transport.abort()  # There is no way yet to say why.
            return
        self._task = self._loop.create_task(self._run())

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        if not self._has_begun:  # uvloop reads before it runs the task.
            self._transport.pause_reading()

    def connection_lost(self, _: BaseException | None) -> None:
        self._lost = True

    def _hand_over(self, received: list[bytes]) -> None:
        """Pass early data to `start_tls`'s protocol before it begins."""
        protocol = cast(asyncio.BufferedProtocol, self._transport.get_protocol())
        rest = b"".join(received)
        while rest:
            buffer = memoryview(protocol.get_buffer(len(rest)))
            size = min(len(buffer), len(rest))
            buffer[:size], rest = rest[:size], rest[size:]
            protocol.buffer_updated(size)

    async def _run(self) -> None:
        if self._transport.is_closing():
            return self._open.remove(self)
        seconds = self._open.limits.header_seconds
        self._has_begun = True
        self._loop.call_soon(self._hand_over, self._received)
        self._received = []
        try:
            transport = await self._loop.start_tls(
                self._transport,
                self,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=seconds or NO_LIMIT,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except OSError as error:  # Those of ssl are, too.
            logger.debug("a TLS handshake failed: %s", error)
            return
        finally:
            self._open.remove(self)
        if transport is None or transport.is_closing() or self._lost:
            return  # It was lost, or evicted, meanwhile.
        connection = self._connection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        for data in self._received:
            connection.data_received(data)
