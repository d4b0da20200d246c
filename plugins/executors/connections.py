"""TCP connections between rank 0 and ranks of other hosts.

Rank 0 listens. Both sides first prove that they know the engine's secret, which is not sent, and
run the same version. Nothing else is read before.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Iterable

from ... import __version__

logger = logging.getLogger("jackfield.worker")
SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
GREETING = struct.Struct(f"!{NONCE_BYTES}sH")
"""A rank's nonce, and its number."""
GREETING_SECONDS = 10.0
"""Seconds for the greeting before the connection is closed."""
SILENT_SECONDS = 30
"""Seconds without acknowledgement after which a connection ends."""


class NotLetIn(ConnectionError):
    """The other side is not of this engine, or has no place for this rank."""


def connect(address: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
    """Return a blocking connection to rank 0, of which both sides are sure. Raises OSError."""
    connection = socket.create_connection(address, timeout=GREETING_SECONDS)
    try:
        greeting = GREETING.pack(secrets.token_bytes(NONCE_BYTES), rank)
        connection.sendall(greeting)
        nonces = greeting + _read(connection, NONCE_BYTES, address)
        connection.sendall(_proof(secret, b"rank", nonces))
        if not hmac.compare_digest(
            _read(connection, PROOF_BYTES, address), _proof(secret, b"leader", nonces)
        ):
            raise NotLetIn(f"who listens at {_shown(address)} does not know the secret")
        connection.settimeout(None)
        _configure(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, size: int, address: tuple[str, int]) -> bytes:
    """Return so many bytes of the side at an address. Raises OSError."""
    received = b""
    while len(received) < size:
        try:
            data = connection.recv(size - len(received))
        except ConnectionResetError:
            data = b""
        if not data:
            raise NotLetIn(
                f"{_shown(address)} has another secret, runs another version of "
                "Jackfield, or has no place for this rank"
            )
        received += data
    return received


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + __version__.encode() + nonces, "sha256")


def _shown(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


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

    def __init__(
        self, listener: socket.socket, ranks: Iterable[int], secret: bytes | None = None
    ) -> None:
        """listener: `core.parallel.join.listen`; `close` closes it. secret: None: a new one."""
        self._loop = asyncio.get_running_loop()
        self.secret = secret or secrets.token_bytes(SECRET_BYTES)
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
            async with asyncio.timeout(GREETING_SECONDS):
                return await self._let_in(connection)
        except (OSError, TimeoutError, EOFError):
            return False

    async def _let_in(self, connection: socket.socket) -> bool:
        """Raises OSError, EOFError."""
        own = secrets.token_bytes(NONCE_BYTES)
        greeting = await _receive(connection, GREETING.size)
        await self._loop.sock_sendall(connection, own)
        proof = await _receive(connection, PROOF_BYTES)
        future = self.connections.get(GREETING.unpack(greeting)[1])
        is_ours = hmac.compare_digest(proof, _proof(self.secret, b"rank", greeting + own))
        if not is_ours or future is None or future.done():
            return False
        await self._loop.sock_sendall(connection, _proof(self.secret, b"leader", greeting + own))
        if future.done():  # Another one with its number came meanwhile.
            return False
        _configure(connection)
        future.set_result(connection)
        return True

    def take(self, rank: int) -> socket.socket:
        """Return a rank's established connection."""
        return self.connections.pop(rank).result()

    async def close(self) -> None:
        """Stop accepting, and close connections that were not taken. Safe to call twice."""
        if self._listener.fileno() < 0:
            return
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


async def _receive(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes. Raises OSError, EOFError."""
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < size:
        data = await loop.sock_recv(connection, size - len(received))
        if not data:
            raise EOFError
        received += data
    return received
