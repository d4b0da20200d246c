"""Serves blocks from host memory to other engines."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from .block_file import BlockFormat
from .block_memory import BlockMemory
from .peer_wire import (
    ANSWER_SECONDS,
    HANDOVER_SECONDS,
    MAX_ANSWER,
    Address,
    Ask,
    Limit,
    PeerError,
    admit,
    encode_count,
    receive_ask,
    send,
)

logger = logging.getLogger("jackfield.kv")

MAX_CONNECTIONS = 256
"""A thread each; further ones are refused."""
IDLE_SECONDS = 60.0
"""Seconds without a question after which a connection ends."""
RETRY_SECONDS = 0.1
WARNING_SECONDS = 60.0
"""Seconds between warnings of those who are refused."""


class BlockServer:
    """Answers what peers ask about a `BlockMemory`."""

    def __init__(
        self, address: Address, secret: bytes, memory: BlockMemory, form: BlockFormat
    ) -> None:
        """Raises OSError if the address cannot be had."""
        self._secret = secret
        self._memory = memory
        self._format = form
        self._lock = threading.Lock()
        self._next_warning = 0.0
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._listener = socket.create_server(where[:2], family=family, backlog=MAX_CONNECTIONS)
        self._accepting = threading.Thread(
            target=self._accept, name="jackfield-kv-serve", daemon=True
        )

    def start(self) -> None:
        self._accepting.start()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closing.set()
            threads = [*self._connections.values()]
            for connection in self._connections:
                _shut_down(connection)
        _shut_down(self._listener)
        if self._accepting.ident is not None:
            self._accepting.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # The peer has gone already, or no more files can be opened for a while.
                if self._closing.wait(RETRY_SECONDS):
                    return
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="jackfield-kv-peer", daemon=True
            )
            with self._lock:
                if self._closing.is_set() or len(self._connections) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                admit(connection, self._secret, self._format.layout.fingerprint)
            except PeerError as error:
                self._warn(connection, error)
                return
            while True:
                self._answer(connection, receive_ask(connection, Limit(IDLE_SECONDS)))
        except (OSError, PeerError) as error:
            logger.debug("a KV peer's connection ends: %s: %s", type(error).__name__, error)
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _warn(self, connection: socket.socket, error: PeerError) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next_warning:
                return
            self._next_warning = now + WARNING_SECONDS
        logger.warning("a KV peer at %s is refused: %s", connection.getpeername()[0], error)

    def _answer(self, connection: socket.socket, ask: Ask) -> None:
        if ask.after is not None:
            self._memory.await_save(ask.after, HANDOVER_SECONDS)
        blocks: list[bytes] = []
        if ask.damaged:
            count = sum(self._forget_if_damaged(key) for key in ask.keys)
        elif ask.content:
            blocks = self._leading_blocks(ask.keys)
            count = len(blocks)
        else:
            count = self._memory.count_present(ask.keys)
        limit = Limit(ANSWER_SECONDS)
        send(connection, encode_count(count), limit)
        for block in blocks:
            send(connection, block, limit)

    def _leading_blocks(self, keys: list[bytes]) -> list[bytes]:
        blocks: list[bytes] = []
        size = 0
        for key in keys:
            block = self._memory.get(key)
            if block is None or (blocks and size + len(block) > MAX_ANSWER):
                break
            blocks.append(block)
            size += len(block)
        return blocks

    def _forget_if_damaged(self, key: bytes) -> bool:
        block = self._memory.get(key)
        if block is None:
            return True
        try:
            self._format.decode(key, block)
        except ValueError:
            self._memory.remove(key)
            return True
        return False


def _shut_down(connection: socket.socket) -> None:
    """Wake the thread that waits for it."""
    with contextlib.suppress(OSError):  # Not connected any more.
        connection.shutdown(socket.SHUT_RDWR)
