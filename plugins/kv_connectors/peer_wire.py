"""What engines say to each other over TCP: proofs of a common secret, questions, encoded blocks.

The server begins: magic and nonce. The client sends its nonce and a MAC of both, then the server
its own MAC. A question is a little-endian length of four bytes and an `Ask` in MessagePack; the
answer a count of four bytes and, if content was asked for, as many blocks, which are equally long.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from typing import NamedTuple

import msgspec

MAGIC = b"jackfield kv 1  "
NONCE_BYTES = 32
MAC_BYTES = 32
FINGERPRINT_BYTES = 32
COUNT_BYTES = 4
ANSWER_SECONDS = 3.0
"""Most seconds for a handshake, or for one question with its answer."""
HANDOVER_SECONDS = 6.0
"""Most seconds that an answer waits for blocks that are still being saved."""
MAX_PORT = 65535
MAX_KEYS = 4096
"""Keys of a question."""
MAX_ASK = 256 << 10
MAX_ANSWER = 8 << 20
"""Bytes of blocks in an answer that has more than one."""


class PeerError(Exception):
    """The other side does not keep to the protocol, or has another secret or model."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: list[bytes]
    content: bool = False
    """Whether the answer has the blocks; otherwise their number alone."""
    after: int | None = None
    """A transfer whose end is awaited first."""
    damaged: bool = False
    """These blocks arrived damaged: → how many really are, which are forgotten."""


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """HOST:PORT, [::1]:PORT for IPv6. Raises ValueError."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
            raise ValueError(f"{text!r} is not HOST:PORT, such as 10.0.0.5:7100 or [fd00::5]:7100")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Limit:
    """A point in time by which an exchange has ended."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds. Raises TimeoutError if there are none."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("no complete message in time")
        return seconds


def receive(connection: socket.socket, count: int, limit: Limit) -> bytearray:
    """Return exactly `count` bytes. Raises OSError, also if the connection ends before."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        connection.settimeout(limit.remaining)
        size = connection.recv_into(view)
        if not size:
            raise ConnectionResetError("the connection has ended")
        view = view[size:]
    return data


def send(connection: socket.socket, data: bytes | memoryview, limit: Limit) -> None:
    """Send all, within the limit. Raises OSError."""
    connection.settimeout(limit.remaining)
    connection.sendall(data)


def encode_count(count: int) -> bytes:
    return count.to_bytes(COUNT_BYTES, "little")


def receive_count(connection: socket.socket, most: int, limit: Limit) -> int:
    """Raises PeerError above `most`."""
    count = int.from_bytes(receive(connection, COUNT_BYTES, limit), "little")
    if count > most:
        raise PeerError(f"a length of {count}, of at most {most}")
    return count


def send_ask(connection: socket.socket, ask: Ask, limit: Limit) -> None:
    message = msgspec.msgpack.encode(ask)
    send(connection, encode_count(len(message)) + message, limit)


def receive_ask(connection: socket.socket, idle: Limit) -> Ask:
    """Return the next question, which begins within `idle`. Raises OSError, PeerError."""
    size = receive_count(connection, MAX_ASK, idle)
    try:
        ask = msgspec.msgpack.decode(receive(connection, size, Limit(ANSWER_SECONDS)), type=Ask)
    except msgspec.DecodeError as error:
        raise PeerError(f"no question: {error}") from None
    if len(ask.keys) > MAX_KEYS:
        raise PeerError(f"{len(ask.keys)} keys, of at most {MAX_KEYS}")
    return ask


# ---------------------------------------------------------------- who it is


def mac(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), hashlib.sha256)


def admit(connection: socket.socket, secret: bytes, fingerprint: bytes) -> None:
    """Check that a client knows the secret, and prove the same. Raises OSError, PeerError."""
    limit = Limit(ANSWER_SECONDS)
    mine = secrets.token_bytes(NONCE_BYTES)
    send(connection, MAGIC + mine, limit)
    reply = bytes(receive(connection, NONCE_BYTES + MAC_BYTES, limit))
    theirs, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
    if not hmac.compare_digest(proof, mac(secret, b"client", mine, theirs)):
        raise PeerError("it has another secret")
    proof = mac(secret, b"server", mine, theirs, fingerprint)
    send(connection, fingerprint + proof, limit)


def enter(connection: socket.socket, secret: bytes, fingerprint: bytes, limit: Limit) -> None:
    """The client's side of `admit`. Raises OSError, PeerError."""
    greeting = bytes(receive(connection, len(MAGIC) + NONCE_BYTES, limit))
    if not greeting.startswith(MAGIC):
        raise PeerError("it is no peer_store of this version")
    theirs, mine = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    send(connection, mine + mac(secret, b"client", theirs, mine), limit)
    try:
        reply = bytes(receive(connection, FINGERPRINT_BYTES + MAC_BYTES, limit))
    except ConnectionResetError:
        raise PeerError("it refuses this engine: its secret_file has another secret") from None
    model, proof = reply[:FINGERPRINT_BYTES], reply[FINGERPRINT_BYTES:]
    if not hmac.compare_digest(proof, mac(secret, b"server", theirs, mine, model)):
        raise PeerError("it has another secret")
    if model != fingerprint:
        raise PeerError(
            "its blocks are of no use here: its model, weights, dtype or block size are others"
        )
