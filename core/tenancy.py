"""Tenants, and the view of a request that plugins get: the types of `authenticate` and
`request_received` in core/hooks.py."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
MAX_ADAPTERS = 1000
"""Names in a tenant's list of adapters."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and rights of a tenant; None: no limit."""

    max_concurrency: AtLeastOne | None = None
    """Requests at once, over all front ends; more get a 429. Those of a batch count, and wait
    instead; a background response counts until it ends."""
    requests_per_minute: AtLeastOne | None = None
    """Requests per minute, over all front ends, counted likewise. A token bucket: this many may
    come at once, and the bucket refills evenly over a minute."""
    max_tokens: AtLeastOne | None = None
    """Most tokens of a completion, also if a request has a larger limit; in batches, too."""

    adapters: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ADAPTERS)] | None = None
    """Names of the adapters it may use, of those that everyone may; None: all of them."""
    adapter_folder: str | None = None
    """Folder on the server from which it may load adapters of its own, which no other tenant sees
    (`POST /v1/load_lora_adapter`, with `--enable-admin`); None: it may load none."""
    max_adapters: AtLeastOne = 16
    """Adapters of its own that it may have."""
    manages_adapters: bool = False
    """Whether it may load adapters for everyone, from anywhere, and unload them (with
    `--enable-admin`)."""
    manages_engine: bool = False
    """Whether it may pause the engine, and change its weights (with `--enable-admin`)."""

    def may_use(self, adapter: str) -> bool:
        """Return whether it may use an adapter of this name that everyone may."""
        return self.adapters is None or adapter in self.adapters

    @property
    def counts_requests(self) -> bool:
        """Whether requests have to be counted for these limits."""
        return self.max_concurrency is not None or self.requests_per_minute is not None


class Tenant(msgspec.Struct, frozen=True):
    """The tenant that a request belongs to."""

    name: str
    """Name for logs. Never the key itself."""
    owner: str
    """Id of the owner of files, batches, responses, request ids and cached prefixes; only requests
    with the same owner find them. It must be unique and stay the same over restarts."""
    limits: TenantLimits = TenantLimits()


ANYONE = Tenant("", "", TenantLimits(manages_adapters=True, manages_engine=True))
"""Tenant of all requests if the server has no authentication."""


SCOPE_END = "\x1f"
"""Ends the owner's digest in `scoped_id`: ASCII's unit separator."""


def scoped_id(owner: str, request_id: str) -> str:
    """Return an id that no other owner's request can have; the id itself without an owner."""
    if not owner:
        return request_id
    digest = hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()
    return f"{digest}{SCOPE_END}{request_id}"


def unscoped_id(request_id: str) -> str:
    """Return the id as its owner chose it."""
    _, end, own = request_id.partition(SCOPE_END)
    return own if end else request_id


class RequestHead(msgspec.Struct, frozen=True):
    """A request without its body, as passed to `authenticate`."""

    method: str
    route: str
    """The route that matched, as it was added: `/v1/files/{file_id}`. Empty if none did."""
    path: str
    """The path as it was sent."""
    headers: Mapping[str, str]
    """Names are case-insensitive."""
    remote: str | None
    """Address of the client, or of its proxy."""

    @property
    def key(self) -> str | None:
        """The API key, if any: from a bearer token, or from the header of Anthropic's clients."""
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
        key = self.headers.get("X-Api-Key", "").strip()
        return key or None


class ReceivedRequest(msgspec.Struct):
    """A request, decoded but not validated: `request_received` may change it."""

    route: str
    """As `RequestHead.route`: `/v1/chat/completions`."""
    body: dict[str, Any]
    """The JSON object. Change it, or assign another one; it is validated afterwards."""
    tenant: Tenant
    headers: Mapping[str, str]
    """Read-only; names are case-insensitive. Empty for a line of a batch."""
