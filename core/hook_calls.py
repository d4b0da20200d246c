"""Calls the hooks that decide about one request; an error of a hook fails that request and names
the plugin."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator
from typing import Any

from .errors import JackfieldError, PluginError
from .registry import Plugins

logger = logging.getLogger("jackfield.plugins")


class RequestHook:
    """The implementations of one hook, in the order in which plugins were loaded.

    A JackfieldError that an implementation raises to refuse the request is passed on. Any other
    exception becomes a PluginError with its distribution's name, and ends that request alone.
    """

    def __init__(self, plugins: Plugins, name: str) -> None:
        self.name = name
        self._plugins = plugins
        self._impls = tuple(reversed(getattr(plugins.manager.hook, name).get_hookimpls()))

    def __bool__(self) -> bool:
        """Whether any plugin implements it."""
        return bool(self._impls)

    async def results(self, **arguments: Any) -> AsyncIterator[tuple[str, Any]]:
        """Call the implementations in order; yield (plugin, result) for each. Raises
        JackfieldError."""
        for impl in self._impls:
            plugin = self._origin(impl.plugin_name)
            try:
                result = impl.function(**{name: arguments[name] for name in impl.argnames})
                if inspect.isawaitable(result):
                    result = await result
            except JackfieldError:
                raise
            except Exception as error:
                logger.exception("plugin %s failed in %s", plugin, self.name)
                raise self.failure(plugin, f"{type(error).__name__} in {self.name}") from error
            yield plugin, result

    def failure(self, plugin: str, what: str) -> PluginError:
        """Return the PluginError for a failed implementation."""
        return PluginError(f"plugin {plugin} failed on this request: {what}")

    def _origin(self, plugin_name: str) -> str:
        origin = self._plugins.provenance.get(plugin_name)
        if origin is None:
            return plugin_name
        return f"{origin.entry_point} of {origin.distribution} {origin.version}".strip()
