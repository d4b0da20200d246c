"""Calls hooks that decide about a request; errors fail it and name the plugin."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator
from typing import Any

from .errors import JackfieldError, PluginError
from .registry import Plugins

logger = logging.getLogger("jackfield.plugins")


class RequestHook:
    """One hook's implementations, in loading order.

    A JackfieldError is a refusal; other exceptions become a PluginError naming the distribution.
    Both end only the request.
    """

    def __init__(self, plugins: Plugins, name: str) -> None:
        self.name = name
        self._plugins = plugins
        self._impls = tuple(reversed(plugins.implementations(name)))

    def __bool__(self) -> bool:
        return bool(self._impls)

    async def results(self, **arguments: Any) -> AsyncIterator[tuple[str, Any]]:
        """Yield (plugin, result) in order. Raises JackfieldError."""
        for impl in self._impls:
            plugin = self._origin(impl.plugin_name)
            try:
                result = self._plugins.call(impl, **arguments)
                if inspect.isawaitable(result):
                    result = await result
            except JackfieldError:
                raise
            except Exception as error:
                logger.exception("plugin %s failed in %s", plugin, self.name)
                raise self.failure(plugin, f"{type(error).__name__} in {self.name}") from error
            yield plugin, result

    def failure(self, plugin: str, what: str) -> PluginError:
        """Return a failed implementation's PluginError."""
        return PluginError(f"plugin {plugin} failed on this request: {what}")

    def _origin(self, plugin_name: str) -> str:
        origin = self._plugins.provenance.get(plugin_name)
        if origin is None:
            return plugin_name
        return f"{origin.entry_point} of {origin.distribution} {origin.version}".strip()
