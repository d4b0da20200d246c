"""Tenants, and the view of a request that plugins get: the types of `authenticate` and
`request_received` in core/hooks.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a tenant; None: no limit."""

    max_concurrency: AtLeastOne | None = None
    """Inference requests at once, over all front ends; more get a 429."""
    requests_per_minute: AtLeastOne | None = None
    """Inference requests per minute, over all front ends; more get a 429. A token bucket: this many
    may come at once, and the bucket refills evenly over a minute."""
    max_tokens: AtLeastOne | None = None
    """Most tokens of a completion, also if a request has a larger limit; in batches, too."""


class Tenant(msgspec.Struct, frozen=True):
    """The tenant that a request belongs to."""

    name: str
    """Name for logs. Never the key itself."""
    owner: str
    """Id of the owner of files, batches and responses; only requests with the same owner find them.
    It must be unique and stay the same over restarts."""
    limits: TenantLimits = TenantLimits()


ANYONE = Tenant("", "")
"""Tenant of all requests if the server has no authentication."""


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
