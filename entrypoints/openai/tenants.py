"""Finds out whose each request is, and lets plugins see what was received.

A tenant is decided once, where a request comes in. Where it goes on inside of the server, to the
front end that keeps what outlives a request or into a batch, the tenant goes along in a header that
only those private connections are asked for.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from ...core.hook_calls import RequestHook
from ...core.registry import Plugins
from ...core.tenancy import ANYONE, ReceivedRequest, RequestHead, Tenant
from ..web.page import page
from .api_keys import KeyRing
from .context import OPEN, ServerOptions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HEADER = "X-Jackfield-Tenant"
"""Between the server's own parts; what a client sends under this name is never looked at."""
_KEY: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)


class Tenancy:
    """How the requests of one application get their tenants."""

    def __init__(self, options: ServerOptions, plugins: Plugins) -> None:
        """Raises ConfigError for a wrong key file."""
        self.keys = KeyRing(options.api_keys, options.api_key_files)
        self._hook = RequestHook(plugins, "authenticate")
        self.received = RequestHook(plugins, "request_received")
        self.required = options.keyed or bool(self._hook)
        """Whether a request must be somebody's."""

    async def tenant(self, request: web.Request) -> Tenant:
        """Raises AuthenticationFailed, what a plugin refuses with, PluginError."""
        head = RequestHead(
            request.method, route_of(request), request.raw_path, request.headers, request.remote
        )
        if (tenant := self.keys.authenticate(head)) is not None:
            return tenant
        async for who, tenant in self._hook.results(request=head):
            if isinstance(tenant, Tenant):
                return tenant
            if tenant is not None:
                raise self._hook.failure(who, f"authenticate gave {type(tenant).__name__}")
        raise KeyRing.refusal()


TENANCY: web.AppKey[Tenancy] = web.AppKey("tenancy", Tenancy)


def route_of(request: web.Request) -> str:
    """The route that matched; empty: none."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def tenant_of(request: web.BaseRequest) -> Tenant:
    """Whose a request is."""
    tenant: Tenant = request.get(_KEY, ANYONE)
    return tenant


@web.middleware
async def authentication(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything but open routes needs a tenant, where there are keys or a plugin tells tenants."""
    tenancy = request.app[TENANCY]
    if (
        tenancy.required
        and route_of(request) not in request.app[OPEN]
        and request.match_info.handler is not page
    ):
        request[_KEY] = await tenancy.tenant(request)
    return await handler(request)


# ---------------------------------------------------------------- inside of the server


def tenant_header(tenant: Tenant) -> str:
    """For HEADER."""
    return base64.b64encode(msgspec.json.encode(tenant)).decode("ascii")


@web.middleware
async def told_tenant(request: web.Request, handler: Handler) -> web.StreamResponse:
    """For applications that only the server itself can reach: HEADER says whose a request is."""
    request[_KEY] = msgspec.json.decode(base64.b64decode(request.headers[HEADER]), type=Tenant)
    return await handler(request)


# ---------------------------------------------------------------- plugins


async def received(request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
    """What plugins make of a decoded body. Raises what they refuse with, PluginError."""
    hook = request.app[TENANCY].received
    told = ReceivedRequest(route_of(request), body, tenant_of(request), request.headers)
    async for who, _ in hook.results(request=told):
        if not isinstance(told.body, dict):
            raise hook.failure(who, f"body became {type(told.body).__name__}")
    return told.body
