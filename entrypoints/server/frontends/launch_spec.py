"""The configuration that the first process sends to a front end's standard input, which is
private.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class LaunchSpec(msgspec.Struct, frozen=True):
    """How to run a front end."""

    argv: list[str]
    """`jackfield serve`'s command line, with keys."""
    index: int
    """From 0; the first keeps stateful objects."""
    folder: str
    """Private folder of the processes' sockets."""
    sockets: tuple[int, ...]
    """Listening sockets' descriptors."""
    started: int
    """The server's start, common to all (seconds since 1970)."""

    num_fronts: int


def engine_socket(folder: str) -> Path:
    """Return the path of the engine's socket for front ends."""
    return Path(folder, "engine")


def stateful_socket(folder: str) -> Path:
    """Return the path of the first front end's socket for the others."""
    return Path(folder, "stateful")


def usage_file(folder: str) -> Path:
    """Return the path of the shared usage counts."""
    return Path(folder, "usage")
