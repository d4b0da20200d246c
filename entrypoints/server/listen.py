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
    """Address and TLS of a server."""

    host: Annotated[
        str, Meta(description="address to bind (default: loopback)"), Flag(group="server")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="port to bind; 0: any free one"),
        Flag(group="server"),
    ] = 8000
    """Resolvers would reduce a port beyond 65535 modulo 65536, and bind another one."""
    uds: Annotated[
        str | None, Meta(description="listen on a Unix socket instead"), Flag(group="server")
    ] = None
    tls: Tls | None = None
    """None: plain HTTP."""
    sockets: tuple[socket.socket, ...] = ()
    """Sockets that the starting process has bound; they replace the fields above."""
