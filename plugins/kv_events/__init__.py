"""Publishes what the KV cache holds, for routers: off without `enable_kv_cache_events`."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...core.hooks import hookimpl
from .options import PARAM, KVEventsOptions


@hookimpl
def register_options(registry: Any) -> None:
    registry.add("kv_events", "jackfield.plugins.kv_events.options:KVEventsOptions")


@hookimpl
def options_ready(options: KVEventsOptions) -> object:
    """Return the hooks that publish. Raises ConfigError without the package that they need."""
    if not options.enable_kv_cache_events or options.publisher == "null":
        return None
    try:
        from .cache_publisher import CachePublisher
    except ImportError as error:
        raise ConfigError(
            f"{PARAM}: events are published by a package that is not installed ({error.name}); "
            "install jackfield[kv-events]",
            param=PARAM,
        ) from error
    return CachePublisher(options)
