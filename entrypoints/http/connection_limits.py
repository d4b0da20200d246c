"""Limits on connections: time that clients may take, number of connections, size of bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ..flags.dataclass_flags import Flag

MAX_JSON_VALUES = 1_500_000
"""Most JSON values in a body, as counted by `body.check_weight`."""
MIN_BODY_RATE = 1024
"""Least bytes per second of a body, measured over `body_seconds`."""


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
    """Time from the connection, or from the first byte of a further request, to the end of the
    headers."""
    body_seconds: Annotated[
        float,
        Meta(description="for a body to come, or to bring 1 KiB for each of them; 0: no limit"),
        Flag("--timeout-body", metavar="SECONDS"),
    ] = 60.0
    """Time in which a body must end, or bring MIN_BODY_RATE bytes for each of these seconds."""
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
    """Time without reading any of a response that waits to be read."""
