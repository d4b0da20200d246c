"""Requests that a browser sends for a page of somebody else's: refused on a server without keys.

Two ways lead there. A page of another site may send a request, though it cannot read the answer; it
carries `Origin`. And a name of that site's may be made to resolve to this machine (DNS rebinding),
so that the browser takes this server for that site; then `Host` is a name that is not ours. A key
stops both, since no browser has it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Middleware

from ...core.errors import Forbidden
from .cors import Cors

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LOOPBACK_HOSTS = ("localhost", "*.localhost")
"""Names that no DNS server is asked for."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and what they answer is hidden from other sites by the browser."""
_PORTS = {"http": "80", "https": "443"}


def default_hosts(host: str) -> tuple[str, ...]:
    """For a server without keys that listens at `host`: names under which to reach a loopback
    address; otherwise all, for others reach it anyway."""
    if is_loopback(host):
        return (*LOOPBACK_HOSTS, host)
    return ("*",)


def is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def allows(hosts: Iterable[str], given: str) -> bool:
    """Whether a `Host` header names one of `hosts`: in any case, with any port. `*.name` stands for
    all names under it, `*` for all. An address is not a name that somebody could redirect."""
    name, _ = split(given)
    if _address(name) is not None:
        return True
    name = name.rstrip(".")
    for host in hosts:
        host = host.lower()
        if host in ("*", name) or (host.startswith("*.") and name.endswith(host[1:])):
            return True
    return False


def same_site(origin: str, host: str) -> bool:
    """Whether an `Origin` is the site that `Host` names. Of its scheme only the port counts, since
    a proxy may have ended TLS."""
    scheme, mark, place = origin.partition("://")
    if not mark:
        return False  # "null"
    name, port = split(place)
    own, own_port = split(host)
    default = _PORTS.get(scheme, "")
    return name == own and (port or default) == (own_port or default)


def split(place: str) -> tuple[str, str]:
    """`name:port` → (name in small letters without brackets, port or nothing)"""
    name, mark, port = place.strip().lower().rpartition(":")
    if not mark or "]" in port:
        name, port = place.strip().lower(), ""
    return name.removeprefix("[").removesuffix("]"), port


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def check_host(hosts: tuple[str, ...]) -> Middleware:
    """A middleware that refuses requests under other names. Raises Forbidden."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Host", "")
        if not allows(hosts, given):
            raise Forbidden(
                f"Host: this server does not answer to {given[:80]!r}; start it with "
                "--allowed-hosts"
            )
        return await handler(request)

    return check


def check_origin(cors: Cors) -> Middleware:
    """A middleware that refuses what pages of other sites have sent. Raises Forbidden."""

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
