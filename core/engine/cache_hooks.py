"""Calls the hooks of the KV cache: `kv_cache_started` and `kv_cache_changed`."""

from __future__ import annotations

import asyncio

from ..cache.events import CacheEvents, KVCacheInfo
from ..cache.kv_manager import KVCacheManager
from ..errors import JackfieldError, PluginError
from ..parts.adapters import adapter_name
from ..registry import Plugins


class CacheHooks:
    """Tells plugins of an engine's KV cache, and of the blocks that prefix hits find in it."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._events: CacheEvents | None = None
        """None: not started, or no plugin follows the cache."""

    def start(self, info: KVCacheInfo, cache: KVCacheManager) -> None:
        """Call `kv_cache_started`, and follow the cache if a plugin does.

        Raises ConfigError, and PluginError for other errors of a plugin.
        """
        for impl in self._plugins.implementations("kv_cache_started"):
            try:
                self._plugins.call(impl, cache=info)
            except JackfieldError:
                raise
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"{self._plugins.source(impl)} failed in kv_cache_started: "
                    f"{type(error).__name__}: {error}"
                ) from error
        if info.enable_prefix_caching and self._plugins.has_listeners("kv_cache_changed"):
            loop = asyncio.get_running_loop()
            self._events = CacheEvents(
                info.block_size, adapter_name, cleared=lambda: loop.call_soon(self.emit_changes)
            )
            cache.watch(self._events)

    def emit_changes(self) -> None:
        """Call `kv_cache_changed` with what has changed since the last call, if anything has."""
        if self._events is not None and (events := self._events.take()):
            self._plugins.emit_now("kv_cache_changed", events=events)
