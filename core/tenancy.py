"""Who a request is from, and what plugins get to see of it: the types of `authenticate` and
`request_received` in core/hooks.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may use; None: no limit."""

    max_concurrency: AtLeastOne | None = None
    """Requests for work at once, over all front ends; more get a 429."""
    requests_per_minute: AtLeastOne | None = None
    """Requests for work, over all front ends; more get a 429. So many may come at once, and then
    again as they come back, evenly over a minute."""
    max_tokens: AtLeastOne | None = None
    """Tokens of an answer at most, whatever a request says; in batches, too."""


class Tenant(msgspec.Struct, frozen=True):
    """Who a request is from."""

    name: str
    """For logs. Never the key itself."""
    owner: str
    """Files, batches and responses belong to it, and only requests with the same one find them. It
    must be the same after a restart, and no other tenant's."""
    limits: TenantLimits = TenantLimits()


ANYONE = Tenant("", "")
"""Every request of a server where nothing authenticates."""


class RequestHead(msgspec.Struct, frozen=True):
    """A request whose body was not read: what `authenticate` decides by."""

    method: str
    route: str
    """The route that matched, as it was added: `/v1/files/{file_id}`. Empty if none did."""
    path: str
    """As it was sent."""
    headers: Mapping[str, str]
    """Found by name in any case."""
    remote: str | None
    """The client's address, or its proxy's."""

    @property
    def key(self) -> str | None:
        """The key that was sent, if any: as a bearer, or as Anthropic's clients send it."""
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
        key = self.headers.get("X-Api-Key", "").strip()
        return key or None


class ReceivedRequest(msgspec.Struct):
    """A request as it came, decoded and not checked: what `request_received` may change."""

    route: str
    """As `RequestHead.route`: `/v1/chat/completions`."""
    body: dict[str, Any]
    """The JSON object. Change it, or put another one here; it is checked afterwards."""
    tenant: Tenant
    headers: Mapping[str, str]
    """Read-only; found by name in any case. Of a line of a batch, none of its own."""
