"""KV blocks as values of a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import redis
from msgspec import Meta
from redis.backoff import NoBackoff
from redis.retry import Retry

from jackfield.core.errors import ConfigError
from jackfield.core.protocols import KVConnectorSetup
from jackfield.plugins.kv_connectors.options import read_options
from jackfield.plugins.kv_connectors.store import StoreConnector

PREFIX = b"jackfield:kv:"


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`."""

    url: str = "redis://127.0.0.1:6379"
    ttl_seconds: Annotated[int, Meta(ge=1)] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0)] = 2.0


class RedisStore:
    """One value a block. Keys already tell models and tenants apart; the server evicts."""

    def __init__(self, setup: KVConnectorSetup) -> None:
        options = read_options(setup.transfer.kv_connector_extra_config, RedisOptions)
        self._ttl = options.ttl_seconds
        try:
            # Connects when it is first used, and from as many threads as use it.
            self._client = redis.Redis.from_url(
                options.url,
                socket_timeout=options.timeout_seconds,
                socket_connect_timeout=options.timeout_seconds,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(
                f"kv_connector_extra_config.url: {error}", param="kv_transfer_config"
            ) from None

    def count_present(self, keys: Sequence[bytes]) -> int:
        """One round trip for all."""
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(_name(key))
            replies = pipeline.execute()
        return next((n for n, present in enumerate(replies) if not present), len(keys))

    def get(self, key: bytes) -> bytes | None:
        """The value; the server counts it as used."""
        return self._client.get(_name(key))

    def put(self, key: bytes, data: bytes) -> None:
        """A value is there as a whole or not at all."""
        self._client.set(_name(key), data, ex=self._ttl)

    def remove(self, key: bytes) -> None:
        """So that it is written anew."""
        self._client.delete(_name(key))

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()


def _name(key: bytes) -> bytes:
    return PREFIX + key.hex().encode()


class RedisConnector(StoreConnector):
    """Blocks in Redis."""

    store_class = RedisStore
