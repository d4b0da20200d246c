"""A client with little overhead: many HTTP streams on bare sockets, read without being parsed.

Runs as a process of its own. Takes a `Drain` as JSON on standard input, prints a `Drained`.
"""

from __future__ import annotations

import select
import socket
import sys
import time

import msgspec

PAUSE = 0.005
"""Seconds between two rounds of reading: a client that waits for each byte makes the sender wake it
for each."""
FRAME = b"data: "


class Drain(msgspec.Struct):
    """The request to send, its address, and the number of streams."""

    host: str
    port: int
    path: str
    body: str
    streams: int


class Drained(msgspec.Struct):
    """What was received."""

    frames: int
    """Number of server-sent events, over all streams."""
    num_bytes: int
    ok: int
    """Number of responses with status 200 and a proper end."""
    cpu_seconds: float
    first: str
    """The first stream's complete response, as received."""


class _Stream:
    def __init__(self, order: Drain, head: bytes, keep: bool) -> None:
        self.socket = socket.create_connection((order.host, order.port))
        self.socket.sendall(head)
        self.socket.setblocking(False)
        self.kept: list[bytes] | None = [] if keep else None
        self.frames = self.num_bytes = 0
        self.ok = False
        self._tail = b""

    def take(self, data: bytes) -> None:
        if not self.num_bytes:
            self.ok = data.startswith(b"HTTP/1.1 200")
        self.num_bytes += len(data)
        self.frames += (self._tail + data).count(FRAME)
        self._tail = data[1 - len(FRAME) :]
        if self.kept is not None:
            self.kept.append(data)


def drain(order: Drain) -> Drained:
    """Open all streams, and read until each is closed."""
    body = order.body.encode()
    head = (
        f"POST {order.path} HTTP/1.1\r\nHost: {order.host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    poll = select.epoll()
    streams: dict[int, _Stream] = {}
    for number in range(order.streams):
        stream = _Stream(order, head, keep=number == 0)
        streams[stream.socket.fileno()] = stream
        poll.register(stream.socket, select.EPOLLIN)
    everything = list(streams.values())
    start = time.process_time()
    while streams:
        for number, _ in poll.poll(timeout=1.0):
            stream = streams[number]
            data = stream.socket.recv(1 << 18)
            if data:
                stream.take(data)
                continue
            stream.ok = stream.ok and stream._tail.endswith(b"\r\n\r\n")
            poll.unregister(number)
            stream.socket.close()
            del streams[number]
        time.sleep(PAUSE)
    return Drained(
        frames=sum(stream.frames for stream in everything),
        num_bytes=sum(stream.num_bytes for stream in everything),
        ok=sum(stream.ok for stream in everything),
        cpu_seconds=time.process_time() - start,
        first=b"".join(everything[0].kept or []).decode(),
    )


if __name__ == "__main__":
    print(msgspec.json.encode(drain(msgspec.json.decode(sys.stdin.read(), type=Drain))).decode())
