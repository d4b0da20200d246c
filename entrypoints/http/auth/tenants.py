"""Determines the tenant of each request, and shows decoded bodies to plugins.

The tenant is determined once, on arrival. Within the server (to the front end with stateful
objects, or in a batch), it travels in a header read on private connections only.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from aiohttp import web

from ....core.errors import Forbidden
from ....core.hook_calls import RequestHook
from ....core.registry import Plugins
from ....core.tenancy import ANYONE, ReceivedRequest, RequestHead, Tenant
from ..options import ServerOptions
from ..routing import Handler, traits_of
from .api_keys import KeyRing

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
    """Require a tenant for every route except keyless ones, with keys or an authenticating plugin;
    and one who may, where the engine is changed."""
    tenancy, traits = request.app[TENANCY], traits_of(request)
    if tenancy.required and not traits.keyless:
        request[_KEY] = await tenancy.tenant(request)
    if traits.manages_engine:
        check_manages_engine(request)
    return await handler(request)


def check_manages_engine(request: web.Request) -> None:
    """Raise Forbidden for whoever may not change the engine."""
    if not tenant_of(request).limits.manages_engine:
        raise Forbidden("this key may not pause the engine or change its weights (manages_engine)")


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
