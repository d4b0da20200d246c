"""Determines the tenant of each request, and shows decoded bodies to plugins.

The tenant is determined once, on arrival. Within the server (to the front end with stateful
objects, or in a batch), it travels in a header read on private connections only.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from ....core.hook_calls import RequestHook
from ....core.registry import Plugins
from ....core.tenancy import ANYONE, ReceivedRequest, RequestHead, Tenant
from ..context import OPEN, OPEN_HANDLERS
from ..options import ServerOptions
from .api_keys import KeyRing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HEADER = "X-Jackfield-Tenant"
"""Header between the server's processes; ignored from clients."""
_KEY: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)


class Tenancy:
    def __init__(self, options: ServerOptions, plugins: Plugins) -> None:
        """Raises ConfigError for an invalid key file."""
        self.keys = KeyRing(options.api_keys, options.api_key_files)
        self._hook = RequestHook(plugins, "authenticate")
        self.received = RequestHook(plugins, "request_received")
        self.required = options.keyed or bool(self._hook)

    async def tenant(self, request: web.Request) -> Tenant:
        """Return the request's tenant. Raises AuthenticationFailed, a plugin's refusal, or
        PluginError.
        """
        head = RequestHead(
            request.method, route_of(request), request.raw_path, request.headers, request.remote
        )
        if (tenant := self.keys.authenticate(head)) is not None:
            return tenant
        async for plugin, tenant in self._hook.results(request=head):
            if isinstance(tenant, Tenant):
                return tenant
            if tenant is not None:
                raise self._hook.failure(plugin, f"authenticate gave {type(tenant).__name__}")
        raise KeyRing.refusal()


TENANCY: web.AppKey[Tenancy] = web.AppKey("tenancy", Tenancy)


def route_of(request: web.Request) -> str:
    """Return the matched route's path, or ""."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def tenant_of(request: web.BaseRequest) -> Tenant:
    tenant: Tenant = request.get(_KEY, ANYONE)
    return tenant


@web.middleware
async def authentication(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Require a tenant for every route except open ones, with keys or an authenticating plugin."""
    tenancy = request.app[TENANCY]
    if (
        tenancy.required
        and route_of(request) not in request.app[OPEN]
        and request.match_info.handler not in request.app[OPEN_HANDLERS]
    ):
        request[_KEY] = await tenancy.tenant(request)
    return await handler(request)


# ---------------------------------------------------------------- inside of the server


def tenant_header(tenant: Tenant) -> str:
    return base64.b64encode(msgspec.json.encode(tenant)).decode("ascii")


@web.middleware
async def forwarded_tenant(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the tenant from HEADER, in applications that only the server can reach."""
    request[_KEY] = msgspec.json.decode(base64.b64decode(request.headers[HEADER]), type=Tenant)
    return await handler(request)


# ---------------------------------------------------------------- plugins


async def received(tenancy: Tenancy, request: ReceivedRequest) -> dict[str, Any]:
    """Return the body after plugins have seen it. Raises their refusals, PluginError."""
    hook = tenancy.received
    async for plugin, _ in hook.results(request=request):
        if not isinstance(request.body, dict):
            raise hook.failure(plugin, f"body became {type(request.body).__name__}")
    return request.body
