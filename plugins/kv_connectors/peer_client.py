"""Asks other engines for blocks; what fails is left alone for a while."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

from .block_file import BlockFormat
from .peer_wire import (
    ANSWER_SECONDS,
    HANDOVER_SECONDS,
    MAX_ANSWER,
    MAX_KEYS,
    Address,
    Ask,
    Limit,
    PeerError,
    enter,
    receive,
    receive_count,
    send_ask,
)
from .store import Health

logger = logging.getLogger("jackfield.kv")

MAX_BLOCKS = 16
"""Blocks of a question for content."""


def blocks_per_answer(form: BlockFormat) -> int:
    """Return the number of blocks that are asked for at once."""
    return max(1, min(MAX_BLOCKS, MAX_ANSWER // form.encoded_bytes))


class Peer:
    """One other engine. Methods are called on threads, several at once, and raise OSError or
    PeerError."""

    def __init__(self, address: Address, secret: bytes, form: BlockFormat) -> None:
        self.address = address
        self.health = Health(f"the KV peer {address}")
        self._secret = secret
        self._format = form
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._closed = False

    def count_present(self, keys: Sequence[bytes], after: int | None = None) -> int:
        """Count the leading `keys` that it has, once its transfer `after` has ended."""
        total = 0
        for first in range(0, len(keys), MAX_KEYS):
            part = list(keys[first : first + MAX_KEYS])
            count, _ = self._exchange(Ask(keys=part, after=after))
            total += count
            if count < len(part):
                break
        return total

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        """Return leading blocks, each [block_bytes], checked. Raises PeerError if one is damaged
        but not in its own memory."""
        count, data = self._exchange(Ask(keys=list(keys), content=True))
        size = self._format.encoded_bytes
        blocks: list[memoryview] = []
        for number, key in enumerate(keys[:count]):
            try:
                blocks.append(self._format.decode(key, data[number * size :][:size]))
            except ValueError as error:
                logger.warning(
                    "block %s of %s is not used: %s", key.hex()[:16], self.address, error
                )
                damaged, _ = self._exchange(Ask(keys=list(keys[number:]), damaged=True))
                if not damaged:
                    raise PeerError(f"it sends a block of which {error}") from None
                break
        return blocks

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _exchange(self, ask: Ask) -> tuple[int, memoryview]:
        """Ask on an idle connection, if there is one. The peer may have ended that in the meantime,
        so then once more on a new one."""
        limit = Limit(ANSWER_SECONDS + (0.0 if ask.after is None else HANDOVER_SECONDS))
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._ask(connection, ask, limit)
            except ConnectionError:
                pass
        return self._ask(self._connect(limit), ask, limit)

    def _connect(self, limit: Limit) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=limit.remaining)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enter(connection, self._secret, self._format.layout.fingerprint, limit)
        except BaseException:
            connection.close()
            raise
        return connection

    def _ask(self, connection: socket.socket, ask: Ask, limit: Limit) -> tuple[int, memoryview]:
        try:
            send_ask(connection, ask, limit)
            count = receive_count(connection, len(ask.keys), limit)
            size = count * self._format.encoded_bytes if ask.content else 0
            data = receive(connection, size, limit)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
        return count, memoryview(data)


class Peers:
    """All peers of an engine, asked in order; what one lacks, the next one may have."""

    def __init__(self, addresses: Sequence[Address], secret: bytes, form: BlockFormat) -> None:
        self._peers = [Peer(address, secret, form) for address in addresses]
        self._last = 0
        """The one that had blocks last is asked first."""

    def count_present(self, keys: Sequence[bytes]) -> int:
        """Count the leading `keys` that the peers have together."""
        return self._count(keys, self._in_order())

    def count_handed_over(self, keys: Sequence[bytes], address: Address, transfer: int) -> int:
        """The same, once a peer's transfer has ended."""
        first = next(peer for peer in self._peers if peer.address == address)
        return self._count(
            keys, [first, *(p for p in self._in_order() if p is not first)], transfer
        )

    def _count(self, keys: Sequence[bytes], peers: Sequence[Peer], after: int | None = None) -> int:
        """`after`: a transfer of the first one."""
        total = 0
        end = time.monotonic() + ANSWER_SECONDS
        for peer in peers:
            if total == len(keys):
                break
            if peer.health.paused or (peer is not peers[0] and time.monotonic() > end):
                continue
            try:
                total += peer.count_present(keys[total:], after if peer is peers[0] else None)
            except (OSError, PeerError) as error:
                peer.health.failed("look up keys", error)
        return total

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        """Return the leading blocks that the peers have together."""
        blocks: list[memoryview] = []
        for peer in self._in_order():
            if len(blocks) == len(keys):
                break
            if peer.health.paused:
                continue
            try:
                part = peer.get(keys[len(blocks) :])
            except (OSError, PeerError) as error:
                peer.health.failed("send blocks", error)
                continue
            if part:
                self._last = self._peers.index(peer)
            blocks += part
        return blocks

    def _in_order(self) -> list[Peer]:
        return self._peers[self._last :] + self._peers[: self._last]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
