"""A request's tenant and data-parallel rank."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, TypedDict

from ....core.engine.request_entry import check_name
from ....core.lora_request import AdapterRef
from ....core.tenancy import ANYONE, Tenant, scoped_id


class EngineOptions(TypedDict):
    """Arguments common to `AsyncEngine`'s generate, chat and encode."""

    request_id: str
    priority: int
    cache_salt: str | None
    data_parallel_rank: int | None
    adapter: AdapterRef | None


class Origin(NamedTuple):
    tenant: Tenant = ANYONE
    data_parallel_rank: int | None = None
    shares_cache: bool = False
    """Whether the tenant shares cached prefixes (`--share-prefix-cache`)."""
    adapter: AdapterRef | None = None
    """The adapter that the request's `model` names; None: the base model."""

    def engine_options(
        self, request_id: str, priority: int, cache_salt: str | None
    ) -> EngineOptions:
        """Return the engine's arguments, with ids and cached prefixes per tenant. Raises
        InvalidRequest.
        """
        owner = self.tenant.owner
        check_name("cache_salt", cache_salt or "")
        return {
            "request_id": scoped_id(owner, request_id),
            "priority": priority,
            "cache_salt": cache_salt if self.shares_cache else _scoped_salt(owner, cache_salt),
            "data_parallel_rank": self.data_parallel_rank,
            "adapter": self.adapter,
        }


def _scoped_salt(owner: str, salt: str | None) -> str | None:
    """Return a salt that no other owner can choose, stable over restarts; unchanged without an
    owner.
    """
    if not owner:
        return salt
    return hashlib.blake2b(repr((owner, salt)).encode(), digest_size=16).hexdigest()
