"""`TenantKit`: whether `authenticate` knows its tenants, all of them and no other.

    class TestMine(TenantKit):
        plugin = my_package.plugin                  # the module, or object, with the hook
        known = [{"Authorization": "Bearer key-of-a"}, {"Authorization": "Bearer key-of-b"}]
        refused = [{"Authorization": "Bearer key-of-one-who-left"}]

Requests are heads alone, as the server makes them; plugins that are installed take no part.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from ...core.errors import JackfieldError
from ...core.hook_calls import RequestHook
from ...core.registry import load_plugins
from ...core.tenancy import RequestHead, Tenant
from .kit import Kit

GARBAGE: tuple[dict[str, str], ...] = (
    {}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer "},
    {"Authorization": "bearer \u00e9\u4e2d\U0001f642"}, {"Authorization": "Basic Og=="},
    {"Authorization": "Bearer " + "x" * 60_000}, {"X-Api-Key": ""}, {"X-Api-Key": "None"},
    {"Authorization": "Bearer %s %n {0}"}, {"Authorization": "Bearer ' OR 1=1 --"},
)  # fmt: skip
"""Headers of requests that are no one's."""
ROUTES = (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/files/{file_id}"),
          ("GET", ""))  # fmt: skip


class TenantKit(Kit):
    """Subclass it, and set the plugin and who is known."""

    known: ClassVar[Sequence[Mapping[str, str]]] = ()
    """Headers of requests, each of another tenant."""
    refused: ClassVar[Sequence[Mapping[str, str]]] = ()
    """Headers of requests that look as if they had a tenant."""

    def head(self, headers: Mapping[str, str], route: tuple[str, str] = ROUTES[0]) -> RequestHead:
        """Return a request as the server passes it: names of headers in any case, read-only."""
        return RequestHead(
            route[0], route[1], route[1].replace("{file_id}", "file-1"),
            CIMultiDictProxy(CIMultiDict(headers)), "192.0.2.7",
        )  # fmt: skip

    def hook(self) -> RequestHook:
        """Return the plugin's hook, newly loaded."""
        if self.plugin is None or not hasattr(self.plugin, "authenticate"):
            pytest.fail("set `plugin` to the module or object with `authenticate`")
        return RequestHook(load_plugins(only=(), extra=(self.plugin,)), "authenticate")

    async def found(self, hook: RequestHook, head: RequestHead) -> Tenant | JackfieldError | None:
        """Return the tenant of a request, None, or the error that refuses it."""
        try:
            async for _, tenant in hook.results(request=head):
                assert tenant is None or isinstance(tenant, Tenant), f"gives {tenant!r}"
                if tenant is not None:
                    return tenant
        except JackfieldError as error:
            return error
        return None

    def tenants(self, heads: Sequence[RequestHead]) -> list[Tenant | JackfieldError | None]:
        """Return what the hook says of each request, all at once."""

        async def run() -> list[Tenant | JackfieldError | None]:
            hook = self.hook()
            return list(await asyncio.gather(*(self.found(hook, head) for head in heads)))

        return asyncio.run(run())

    # -------------------------------------------------------------- tests

    def test_each_of_the_known_has_a_tenant_of_its_own(self) -> None:
        if not self.known:
            pytest.fail("the kit was told of no one: give it known")
        owners = []
        for tenant in self.tenants([self.head(headers) for headers in self.known]):
            assert isinstance(tenant, Tenant), f"someone known is refused: {tenant!r}"
            assert tenant.name and tenant.owner, "a tenant without a name or an owner"
            copy = msgspec.convert(msgspec.to_builtins(tenant), Tenant)
            assert copy == tenant, "limits of no use"
            owners.append(tenant.owner)
        assert len(set(owners)) == len(owners), "two of the known own the same things"

    def test_the_owner_is_the_same_every_time(self) -> None:
        """On every route, at once or one after another, however headers are written, and when the
        plugin is loaded anew: files and batches belong to the owner."""
        for headers in self.known:
            heads = [self.head(headers, route) for route in ROUTES]
            heads += [self.head({name.swapcase(): value for name, value in headers.items()})]
            tenants = self.tenants(heads * 3) + self.tenants(heads)
            owners = {each.owner if isinstance(each, Tenant) else repr(each) for each in tenants}
            assert len(owners) == 1, owners

    def test_requests_at_once_do_not_mix(self) -> None:
        heads = [self.head(headers) for headers in self.known]
        alone = [self.tenants([head])[0] for head in heads]
        together = self.tenants([heads[at % len(heads)] for at in range(16 * len(heads))])
        for at, tenant in enumerate(together):
            assert tenant == alone[at % len(heads)], "a request has another one's tenant"

    def test_no_one_else_has_a_tenant(self) -> None:
        """None, or an error of `core.errors` with a status from 400 to 499; no other exception."""
        near: list[dict[str, str]] = []
        for headers in self.known:
            for name, value in headers.items():
                for other in (value[:-1], value + "x", value[:-1] + "~", value + "\u0000"):
                    near.append({**headers, name: other})
        cases = [*self.refused, *GARBAGE, *near]
        for headers, tenant in zip(cases, self.tenants([self.head(c) for c in cases]), strict=True):
            assert not isinstance(tenant, Tenant), f"{headers!r} belongs to {tenant!r}"
            assert tenant is None or 400 <= tenant.status < 500, f"{headers!r}: {tenant!r}"

    def test_names_and_refusals_do_not_show_keys(self) -> None:
        """Names are in logs, and refusals in responses."""
        everyone = [*self.known, *self.refused]
        tenants = self.tenants([self.head(headers) for headers in everyone])
        for headers, each in zip(everyone, tenants, strict=True):
            shown = each.name if isinstance(each, Tenant) else str(each)
            for value in headers.values():
                secret = value.split()[-1]
                assert len(secret) < 4 or secret not in shown, f"{shown!r} shows {secret!r}"

    def test_a_request_is_read_and_not_changed(self) -> None:
        for headers in (*self.known, *self.refused):
            own = dict(copy.deepcopy(headers))
            head = self.head(own)
            self.tenants([head])
            assert dict(head.headers) == dict(headers)
