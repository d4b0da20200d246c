"""What the first process tells a front end on its standard input: nobody else can read it there."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Order(msgspec.Struct, frozen=True):
    """One front end's part. As JSON."""

    argv: list[str]
    """The command line of `jackfield serve`, keys included."""
    index: int
    """From 0; the first one keeps what outlives a request."""
    folder: str
    """The private folder with the sockets between the processes."""
    sockets: tuple[int, ...]
    """File descriptors to listen on."""
    started: int
    """When the server was started, as all front ends tell it (seconds since 1970)."""

    num_fronts: int
    """How many there are."""


def engine_socket(folder: str) -> Path:
    """Where the engine listens for front ends."""
    return Path(folder, "engine")


def keeper_socket(folder: str) -> Path:
    """Where the first front end listens for the others."""
    return Path(folder, "keeper")


def usage_file(folder: str) -> Path:
    """Where front ends count together what tenants use."""
    return Path(folder, "usage")
