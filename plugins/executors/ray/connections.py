"""TCP connections between rank 0 and ranks of other hosts.

Rank 0 listens; a connecting rank first sends its number and the engine's secret, which it got
through Ray. Nothing is decoded before.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct

logger = logging.getLogger("jackfield.worker")
SECRET_BYTES = 32
GREETING = struct.Struct(f"!{SECRET_BYTES}sH")
"""The secret, and the rank's number."""
GREETING_SECONDS = 10.0
"""Seconds for the greeting before the connection is closed."""
SILENT_SECONDS = 30
"""Seconds without acknowledgement after which a connection ends."""


def connect(address: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
    """Return a blocking, greeted connection to rank 0. Raises OSError."""
    connection = socket.create_connection(address, timeout=GREETING_SECONDS)
    connection.settimeout(None)
    _configure(connection)
    connection.sendall(GREETING.pack(secret, rank))
    return connection


def _configure(connection: socket.socket) -> None:
    """Send small messages at once, and detect a lost host."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": SILENT_SECONDS // 3,
        "TCP_KEEPINTVL": SILENT_SECONDS // 6,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": 1000 * SILENT_SECONDS,
    }.items():  # Not every system has them.
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Reception:
    """Rank 0's side: accepts the other ranks' connections."""

    def __init__(self, listener: socket.socket, ranks: range) -> None:
        """listener: `core.parallel.join.listen`; `close` closes it."""
        self._loop = asyncio.get_running_loop()
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.connections: dict[int, asyncio.Future[socket.socket]] = {
            rank: self._loop.create_future() for rank in ranks
        }
        self._listener = listener
        self._listener.setblocking(False)
        self._greetings: set[asyncio.Task[bool]] = set()
        # In a callback: a task that awaits it may be cancelled with a connection in hand.
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, (host, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # No descriptor is left, and there may never be one.
            self._loop.remove_reader(self._listener)
            logger.error("connections of ranks are not accepted any more: %s", error)
            return
        greeting = asyncio.create_task(self._greet(connection))
        self._greetings.add(greeting)

        def ended(greeting: asyncio.Task[bool]) -> None:
            self._greetings.discard(greeting)
            if greeting.cancelled() or not greeting.result():
                connection.close()
                logger.warning("a connection from %s was closed: it is not of a rank", host)

        greeting.add_done_callback(ended)

    async def _greet(self, connection: socket.socket) -> bool:
        """Assign the connection to its rank; False: to none."""
        try:
            connection.setblocking(False)
            received = await asyncio.wait_for(_receive(connection), GREETING_SECONDS)
            secret, rank = GREETING.unpack(received)
            future = self.connections.get(rank)
            is_ours = hmac.compare_digest(secret, self.secret)
            if not is_ours or future is None or future.done():
                return False
            _configure(connection)
            future.set_result(connection)
            return True
        except (OSError, TimeoutError, EOFError):
            return False

    def take(self, rank: int) -> socket.socket:
        """Return a rank's established connection."""
        return self.connections.pop(rank).result()

    async def close(self) -> None:
        """Stop accepting, and close connections that were not taken."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        greetings = tuple(self._greetings)
        for greeting in greetings:
            greeting.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)
        for future in self.connections.values():
            if not future.cancel() and not future.cancelled():
                future.result().close()
        self.connections.clear()


async def _receive(connection: socket.socket) -> bytes:
    """Return a greeting. Raises EOFError."""
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < GREETING.size:
        data = await loop.sock_recv(connection, GREETING.size - len(received))
        if not data:
            raise EOFError
        received += data
    return received
