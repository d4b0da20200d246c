"""The KV connector and its options: `EngineConfig.kv_transfer_config`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ..errors import ConfigError
from .annotations import doc

FIELD = "kv_transfer_config"


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV connector and its options: `EngineConfig.kv_transfer_config`. Names are vLLM's."""

    kv_connector: Annotated[str, doc("KV connector by name.", min_length=1)]
    kv_role: Annotated[
        Literal["kv_both", "kv_producer", "kv_consumer"],
        doc("kv_producer only saves, kv_consumer only loads, kv_both does both."),
    ] = "kv_both"
    kv_connector_extra_config: Annotated[dict[str, Any], doc("The connector's own options.")] = {}
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        doc("What a request does when its KV cannot be loaded: compute it, or end with an error."),
    ] = "recompute"
    member: Annotated[
        int, doc("The engine's number, of several (data_parallel_size). The engine sets it.")
    ] = 0

    @classmethod
    def read(cls, value: dict[str, Any] | KVTransferConfig) -> KVTransferConfig:
        """Return the configuration, checked. Raises ConfigError."""
        if isinstance(value, KVTransferConfig):  # Its constructor checks nothing.
            value = msgspec.structs.asdict(value)
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{FIELD}: {error} (got {value!r})", param=FIELD) from None
