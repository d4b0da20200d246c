"""The sockets that clients connect to, bound before the front ends start.

TCP: each front end has a socket of its own on one port (`SO_REUSEPORT`), and the kernel spreads
connections over them, however many come at once. One socket for all would do worse: whoever wakes
first takes all that wait. The first process holds all of them open, so that clients who come while
a front end is being restarted wait for it, and are not refused.

A Unix socket (`--uds`) has no such spreading: one is shared, and whoever is free takes what comes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..openai.server import Listen


@contextlib.contextmanager
def bound(listen: Listen, count: int) -> Iterator[list[tuple[socket.socket, ...]]]:
    """For each of `count` front ends its sockets, bound and not listening. Raises OSError."""
    with contextlib.ExitStack() as stack:
        if listen.uds:
            one = stack.enter_context(_unix(Path(listen.uds)))
            yield [(one,)] * count
            return
        port = listen.port
        if port:
            check_free(listen.host, port)
        made: list[tuple[socket.socket, ...]] = []
        for _ in range(count):
            own = []
            for family, address in _addresses(listen.host, port):
                one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((address[0], port, *address[2:]))
                port = one.getsockname()[1]
                own.append(one)
            made.append(tuple(own))
        yield made


def check_free(host: str, port: int) -> None:
    """Whether a server may have this address. Raises OSError.

    A server that shares its port would not be noticed otherwise.
    """
    for family, address in _addresses(host, port):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


@contextlib.contextmanager
def _unix(path: Path) -> Iterator[socket.socket]:
    """In the place of a socket that an earlier server left."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(path))
        try:
            yield made
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
