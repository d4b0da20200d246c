"""ZeroMQ addresses of the sockets that publish."""

from __future__ import annotations

import re

from ...core.errors import ConfigError
from .options import PARAM

LOOPBACK = "tcp://127.0.0.1:5557"
"""Bound where no endpoint is given: events hold the token ids of prompts, and all may subscribe."""
_TCP = re.compile(r"tcp://(?P<host>[^/\s]+):(?P<port>\d{1,5})")
_IPC = re.compile(r"ipc://\S+")


def of_member(endpoint: str, member: int, field: str) -> str:
    """Return the endpoint of an engine, of several. Raises ConfigError for one that is no address
    of `tcp` or `ipc`.

    Its number is added to the port, but to port 0, which the system chooses.
    """
    match = _TCP.fullmatch(endpoint)
    if match is not None and int(match["port"]) + member < 1 << 16:
        port = int(match["port"])
        return f"tcp://{match['host']}:{port + member if port else 0}"
    if match is None and _IPC.fullmatch(endpoint):
        return f"{endpoint}_dp{member}" if member else endpoint
    raise ConfigError(
        f"{PARAM}.{field}: must be an address such as tcp://*:5557 or ipc:///run/events, got "
        f"{endpoint!r}" + (f" for engine {member}" if member else ""),
        param=f"{PARAM}.{field}",
    )


def is_bound(endpoint: str) -> bool:
    """Return whether a PUB socket binds this endpoint; it connects to others."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
