"""The sockets that clients connect to, bound before the front ends start.

TCP: each front end has a socket of its own on one port (`SO_REUSEPORT`), and the kernel distributes
connections over them, however many arrive at once. One shared socket's connections would all go to
the first process to wake. The first process keeps all sockets open, so clients of a restarting
front end wait instead of being refused.

A Unix socket (`--uds`) is shared, and any idle front end accepts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..listen import Listen


@contextlib.contextmanager
def bound(listen: Listen, count: int) -> Iterator[list[tuple[socket.socket, ...]]]:
    """Yield the bound sockets of `count` front ends, not listening. Raises OSError."""
    with contextlib.ExitStack() as stack:
        if listen.uds:
            listener = stack.enter_context(_unix(Path(listen.uds)))
            yield [(listener,)] * count
            return
        port = listen.port
        if port:
            check_free(listen.host, port)
        sockets: list[tuple[socket.socket, ...]] = []
        for _ in range(count):
            own = []
            for family, address in _addresses(listen.host, port):
                listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((address[0], port, *address[2:]))
                port = listener.getsockname()[1]
                own.append(listener)
            sockets.append(tuple(own))
        yield sockets


def check_free(host: str, port: int) -> None:
    """Check that a server may bind this address. Raises OSError.

    Another server sharing its port would go unnoticed.
    """
    for family, address in _addresses(host, port):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)


def check_unix_free(path: Path) -> None:
    """Check that a server may listen at `path`, perhaps on an earlier server's socket. Raises
    OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            pass  # More clients wait than that server accepts: it may hang.
        except (FileNotFoundError, ConnectionRefusedError):
            if (path.exists() or path.is_symlink()) and not path.is_socket():
                raise FileExistsError(errno.EEXIST, "it exists, and is no socket") from None
            if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "its folder cannot be written to") from None
            return
    raise OSError(errno.EADDRINUSE, "a server listens there")


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))


@contextlib.contextmanager
def _unix(path: Path) -> Iterator[socket.socket]:
    """Bind a Unix socket, replacing an earlier server's."""
    check_unix_free(path)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.bind(str(path))
        try:
            yield probe
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
