"""Limits on connections: time that clients may take, number of connections, size of bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ..flags.dataclass_flags import Flag

MAX_JSON_VALUES = 1_500_000
"""As counted by `body.check_weight`."""
MIN_BODY_RATE = 1024
"""Least bytes per second of a body over `body_seconds`."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Seconds that a client may take, 0 for no limit, and the number of connections."""

    max_connections: Annotated[
        int | None,
        Meta(
            ge=1,
            description="open connections at once, of each front end; beyond, the oldest one "
            "without a request is closed (default: what the limit of descriptors allows)",
        ),
        Flag(metavar="N"),
    ] = None
    """None: the limit of descriptors, less about 256."""
    header_seconds: Annotated[
        float,
        Meta(
            description="for a request's headers to come, and before that for a TLS "
            "handshake; 0: no limit"
        ),
        Flag("--timeout-header", metavar="SECONDS"),
    ] = 30.0
    """From the connection, or a further request's first byte, to the headers' end."""
    body_seconds: Annotated[
        float,
        Meta(description="for a body to come, or to bring 1 KiB for each of them; 0: no limit"),
        Flag("--timeout-body", metavar="SECONDS"),
    ] = 60.0
    """Time for a body to end, or to bring MIN_BODY_RATE bytes per second."""
    idle_seconds: Annotated[
        float,
        Meta(description="without a request before a connection is closed; 0: no limit"),
        Flag("--timeout-keep-alive", metavar="SECONDS"),
    ] = 75.0
    """Idle time between two requests."""
    send_seconds: Annotated[
        float,
        Meta(description="for a client to read nothing of its response; 0: no limit"),
        Flag("--timeout-send", metavar="SECONDS"),
    ] = 300.0
    """Without reading any of a pending response."""
