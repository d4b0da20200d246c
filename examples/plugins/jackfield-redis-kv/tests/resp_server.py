"""A small server of the Redis protocol, for tests: `python resp_server.py SOCKET`.

Keeps values in memory, and serves the commands that the connector and its tests send.
Prints a line when it listens, so that whoever starts it need not poll.
"""

from __future__ import annotations

import fnmatch
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any, BinaryIO

Reply = bytes | int | str | list[Any] | dict[bytes, Any] | None
"""A str is a status line; bytes are a value; None is the missing value."""
ABOUT = {b"server": b"redis", b"version": b"7.0.0", b"mode": b"standalone"}


class Values:
    """What is stored, with the time that each value expires at."""

    def __init__(self) -> None:
        self._values: dict[bytes, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def answer(self, words: list[bytes]) -> Reply:
        """The reply to one command. Raises KeyError, ValueError for what is not served."""
        name, *arguments = words
        commands: dict[bytes, Callable[..., Reply]] = {
            b"CLIENT": lambda *_: "OK",
            b"DEL": self.delete,
            b"EXISTS": lambda *keys: sum(key in self._values for key in keys),
            b"GET": lambda key: self._values.get(key, (None, inf))[0],
            b"HELLO": lambda version=b"2", *_: {**ABOUT, b"proto": int(version)},
            b"KEYS": self.keys,
            b"PING": lambda: "PONG",
            b"SELECT": lambda _: "OK",
            b"SET": self.set,
            b"TTL": self.ttl,
        }
        with self._lock:
            now = time.monotonic()
            for key in [key for key, (_, until) in self._values.items() if until <= now]:
                del self._values[key]
            return commands[name.upper()](*arguments)

    def delete(self, *keys: bytes) -> int:
        return sum(self._values.pop(key, None) is not None for key in keys)

    def keys(self, pattern: bytes) -> list[bytes]:
        return [key for key in self._values if fnmatch.fnmatchcase(key, pattern)]

    def set(self, key: bytes, value: bytes, *options: bytes) -> str:
        until = inf
        if options:
            unit, number = options
            if unit.upper() != b"EX":
                raise ValueError(f"SET with {unit!r}")
            until = time.monotonic() + int(number)
        self._values[key] = value, until
        return "OK"

    def ttl(self, key: bytes) -> int:
        if key not in self._values:
            return -2
        until = self._values[key][1]
        return -1 if until == inf else round(until - time.monotonic())


class Connection(socketserver.StreamRequestHandler):
    """Reads commands, one after another, and answers each."""

    def handle(self) -> None:
        version = 2
        while (words := read_command(self.rfile)) is not None:
            if words[0].upper() == b"HELLO" and len(words) > 1:
                version = int(words[1])
            try:
                reply = encode(self.server.values.answer(words), version)
            except (KeyError, TypeError, ValueError) as error:
                reply = f"-ERR not served: {words[0]!r}: {error}\r\n".encode()
            self.wfile.write(reply)


def read_command(source: BinaryIO) -> list[bytes] | None:
    """An array of bulk strings; None where the connection ends."""
    header = source.readline()
    if not header:
        return None
    words = []
    for _ in range(int(header[1:])):
        size = int(source.readline()[1:])
        words.append(source.read(size))
        source.read(2)
    return words


def encode(reply: Reply, version: int) -> bytes:
    """The reply in this version of the protocol, 2 or 3."""
    match reply:
        case None:
            return b"_\r\n" if version == 3 else b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case str():
            return b"+%s\r\n" % reply.encode()
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n%s" % (len(reply), b"".join(encode(item, version) for item in reply))
        case dict():
            words = [encode(word, version) for pair in reply.items() for word in pair]
            mark, size = (b"%", len(reply)) if version == 3 else (b"*", 2 * len(reply))
            return b"%s%d\r\n%s" % (mark, size, b"".join(words))


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    values = Values()


if __name__ == "__main__":
    with Server(sys.argv[1], Connection) as server:
        print("Ready to accept connections", flush=True)
        server.serve_forever()
