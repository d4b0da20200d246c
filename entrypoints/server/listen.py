"""The address at which a server listens."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ..flags.dataclass_flags import Flag
from ..http.tls import Tls


@dataclass(frozen=True)
class Listen:
    host: Annotated[
        str, Meta(description="address to bind (default: loopback)"), Flag(group="server")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="port to bind; 0: any free one"),
        Flag(group="server"),
    ] = 8000
    """Resolvers would wrap larger ports."""
    uds: Annotated[
        str | None, Meta(description="listen on a Unix socket instead"), Flag(group="server")
    ] = None
    tls: Tls | None = None
    sockets: tuple[socket.socket, ...] = ()
    """Bound sockets of the starting process, replacing the fields above."""
