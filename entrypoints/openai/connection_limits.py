"""How long clients may take, how many may come, how much they may send: options with defaults."""

from __future__ import annotations

from dataclasses import dataclass

MAX_JSON_VALUES = 1_500_000
"""In a body, as `body.check_weight` counts them."""
MIN_BODY_RATE = 1024
"""Bytes a second that a body must bring, over `body_seconds`."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Seconds that a client may take, 0 for as long as it likes, and how many may come."""

    header_seconds: float = 30.0
    """From the connection, or the first byte of a further request, to the end of its headers."""
    body_seconds: float = 60.0
    """In which a body must end, or bring MIN_BODY_RATE bytes for each of them."""
    idle_seconds: float = 75.0
    """Between two requests."""
    send_seconds: float = 300.0
    """Without reading anything of a response that waits to be read."""
    max_connections: int | None = None
    """At once, in each process; None: as many as descriptors allow, less some 256."""
