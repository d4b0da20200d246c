"""The configuration that the first process sends to a front end on its standard input, which is
private."""

from __future__ import annotations

from pathlib import Path

import msgspec


class LaunchSpec(msgspec.Struct, frozen=True):
    """How to run one front end, sent as JSON."""

    argv: list[str]
    """The command line of `jackfield serve`, keys included."""
    index: int
    """Index from 0; the first one keeps stateful objects."""
    folder: str
    """The private folder with the sockets of the processes."""
    sockets: tuple[int, ...]
    """Descriptors of the sockets to listen on."""
    started: int
    """When the server was started, the same in all front ends (seconds since 1970)."""

    num_fronts: int
    """Number of front ends."""


def engine_socket(folder: str) -> Path:
    """Return the path of the socket at which the engine listens for front ends."""
    return Path(folder, "engine")


def stateful_socket(folder: str) -> Path:
    """Return the path of the socket at which the first front end listens for the others."""
    return Path(folder, "stateful")


def usage_file(folder: str) -> Path:
    """Return the path of the file in which front ends count tenants' usage together."""
    return Path(folder, "usage")
