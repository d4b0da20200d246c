"""Refuses browsers' requests for other sites' pages, on a server without keys.

Another site's page may send a request, with `Origin`, though it cannot read the response. Or its
name may resolve to this machine (DNS rebinding): then `Host` is not this server's. With keys
neither works.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Middleware

from ....core.errors import Forbidden
from ..options import Cors

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LOOPBACK_HOSTS = ("localhost", "*.localhost")
"""Names not resolved by DNS."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; browsers hide their responses from other sites."""
_PORTS = {"http": "80", "https": "443"}


def default_hosts(host: str) -> tuple[str, ...]:
    """Return the default names in `Host` for a server at `host`: a loopback address's; otherwise
    all, as other machines can reach it anyway.
    """
    if is_loopback(host):
        return (*LOOPBACK_HOSTS, host)
    return ("*",)


def is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def allows(hosts: Iterable[str], header: str) -> bool:
    """Return whether `Host` is one of `hosts`, ignoring case and port. `*.name` matches subdomains,
    `*` all; IP addresses always match, as DNS cannot redirect them.
    """
    name, _ = split(header)
    if _address(name) is not None:
        return True
    name = name.rstrip(".")
    for host in hosts:
        host = host.lower()
        if host in ("*", name) or (host.startswith("*.") and name.endswith(host[1:])):
            return True
    return False


def same_site(origin: str, host: str) -> bool:
    """Return whether `Origin` is the site of `Host`; ignores a port, as a proxy may have ended
    TLS.
    """
    scheme, mark, place = origin.partition("://")
    if not mark:
        return False  # "null"
    name, port = split(place)
    own, own_port = split(host)
    default = _PORTS.get(scheme, "")
    return name == own and (port or default) == (own_port or default)


def split(place: str) -> tuple[str, str]:
    """Split `name:port` into lower-case name without brackets, and port or ""."""
    name, mark, port = place.strip().lower().rpartition(":")
    if not mark or "]" in port:
        name, port = place.strip().lower(), ""
    return name.removeprefix("[").removesuffix("]"), port


@functools.lru_cache(maxsize=64)
def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def check_host(hosts: tuple[str, ...]) -> Middleware:
    """Return a middleware that refuses other hosts with Forbidden.

    A request without `Host` (HTTP/1.0) comes from health checks, not browsers.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host")
        if host is not None and not allows(hosts, host):
            raise Forbidden(
                f"Host: this server does not answer to {host[:80]!r}; start it with --allowed-hosts"
            )
        return await handler(request)

    return check


def check_origin(cors: Cors) -> Middleware:
    """Return a middleware that refuses requests from other sites' pages."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if (
            origin is not None
            and request.method not in SAFE_METHODS
            and not cors.allows(origin)
            and not same_site(origin, request.headers.get("Host", ""))
        ):
            raise Forbidden(
                f"Origin: pages of {origin[:80]!r} may not use this server; start it with "
                "--allowed-origins, or with a key"
            )
        return await handler(request)

    return check
