"""The kit of tenants: a right plugin passes it, and planted bugs do not."""

from __future__ import annotations

import asyncio
import hmac
import itertools
from types import ModuleType
from typing import Any

import pytest
from mutants import run_kit

from jackfield import hookimpl
from jackfield.core.errors import AuthenticationFailed
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.tenancy import RequestHead, Tenant, TenantLimits
from jackfield.plugins.conformance.tenants import TenantKit

KEYS = {"key-of-anna": "anna", "key-of-boris": "boris"}
CLOSED = {"key-of-one-who-left"}


def plugin_with(authenticate: Any) -> ModuleType:
    plugin = ModuleType("planted_tenants")
    plugin.authenticate = hookimpl(authenticate)  # type: ignore[attr-defined]
    plugin.jackfield_api = API_VERSION  # type: ignore[attr-defined]
    return plugin


def account(key: str | None) -> Tenant | None:
    if key in CLOSED:
        raise AuthenticationFailed("this account is closed")
    for known, name in KEYS.items():
        if key is not None and hmac.compare_digest(known.encode(), key.encode()):
            return Tenant(name, f"account:{name}", TenantLimits(max_tokens=4))
    return None


async def right(request: RequestHead) -> Tenant | None:
    await asyncio.sleep(0)
    return account(request.key)


class Kit(TenantKit):
    plugin = plugin_with(right)
    known = [{"Authorization": f"Bearer {key}"} for key in KEYS]
    refused = [{"Authorization": f"Bearer {key}"} for key in CLOSED]


def prefix(request: RequestHead) -> Tenant | None:
    return next((account(k) for k in KEYS if (request.key or "").startswith(k)), None)


def anyone(request: RequestHead) -> Tenant | None:
    return None if request.key is None else account(request.key) or Tenant("guest", "guest")


def one_owner(request: RequestHead) -> Tenant | None:
    found = account(request.key)
    return found and Tenant(found.name, "account")


def name_is_key(request: RequestHead) -> Tenant | None:
    found = account(request.key)
    return found and Tenant(str(request.key), found.owner)


numbers = itertools.count()


def counted(request: RequestHead) -> Tenant | None:
    found = account(request.key)
    return found and Tenant(found.name, f"{found.owner}:{next(numbers)}")


def fails_without(request: RequestHead) -> Tenant | None:
    return account(request.headers["Authorization"].split()[1])


last: list[Any] = []


async def mixes(request: RequestHead) -> Tenant | None:
    last[:] = [request.key]
    await asyncio.sleep(0)
    return account(last[0])


def by_route(request: RequestHead) -> Tenant | None:
    found = account(request.key)
    return found and Tenant(found.name, f"{found.owner}{request.route}")


def tells(request: RequestHead) -> Tenant | None:
    if account(request.key) is None:
        raise AuthenticationFailed(f"{request.key} is unknown")
    return account(request.key)


def closed_is_told(request: RequestHead) -> Tenant | None:
    if request.key in CLOSED:
        raise AuthenticationFailed(f"{request.key} is closed")
    return account(request.key)


def gives_a_name(request: RequestHead) -> Any:
    found = account(request.key)
    return found and found.name


def exact_names(request: RequestHead) -> Tenant | None:
    value = dict(request.headers).get("Authorization", "")
    return account(value.partition(" ")[2] or None)


def forgets_the_closed(request: RequestHead) -> Tenant | None:
    return Tenant("left", "account:left") if request.key in CLOSED else account(request.key)


def needs_ascii(request: RequestHead) -> Tenant | None:
    found = KEYS.get((request.key or "").encode("ascii").decode())
    return found and Tenant(found, f"account:{found}")  # type: ignore[return-value]


EACH = "test_each_of_the_known_has_a_tenant_of_its_own"
OWNER = "test_the_owner_is_the_same_every_time"
MIX = "test_requests_at_once_do_not_mix"
ELSE = "test_no_one_else_has_a_tenant"
SECRET = "test_names_and_refusals_do_not_show_keys"
MUTANTS: dict[str, tuple[Any, str]] = {
    "a key that begins right": (prefix, ELSE),
    "anyone is a guest": (anyone, ELSE),
    "all own the same": (one_owner, EACH),
    "the key is the name": (name_is_key, SECRET),
    "an owner a request": (counted, OWNER),
    "raises without a header": (fails_without, ELSE),
    "requests mix": (mixes, MIX),
    "an owner a route": (by_route, OWNER),
    "the refusal shows the key": (closed_is_told, SECRET),
    "a name in place of a tenant": (gives_a_name, EACH),
    "names of headers in one case": (exact_names, OWNER),
    "who left is known": (forgets_the_closed, ELSE),
    "raises for letters": (needs_ascii, ELSE),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_kit_notices(name: str) -> None:
    planted, fails = MUTANTS[name]
    kit = type("TestMutant", (Kit,), {"plugin": plugin_with(planted)})
    assert fails in run_kit(kit).by_outcome["failed"]


def test_the_kit_passes_what_is_right() -> None:
    outcomes = run_kit(type("TestGood", (Kit,), {}))
    assert not outcomes.by_outcome["failed"], outcomes.reasons
