"""What this package plugs into Jackfield. Keep this module light: it is imported at every start."""

from __future__ import annotations

from typing import Any

from jackfield import hookimpl

jackfield_api = 3


@hookimpl
def register_kv_connectors(registry: Any) -> None:
    registry.add("redis", "jackfield_redis_kv.connector:RedisConnector")
