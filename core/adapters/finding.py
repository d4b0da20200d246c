"""Finds adapters: what form is at a path, and the paths of names that are not loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import NotFound, PluginError, shown
from ..local_path import local_path
from ..registry import Plugins

MAX_RESOLVING = 16
"""Names that resolvers look for at once; others wait."""


class Finder:
    """The adapter formats and resolvers of an engine's plugins."""

    def __init__(self, config: EngineConfig, plugins: Plugins) -> None:
        self._config = config
        self._formats = plugins["adapter_format"]
        self._registry = plugins["adapter_resolver"]
        self._resolvers: dict[str, Any] | None = None
        """Name → resolver; None before the first name that is not loaded."""
        self._turns = asyncio.Semaphore(MAX_RESOLVING)

    async def format_at(self, path: str) -> str:
        """Return the name of the format of the adapter at a path. Raises NotFound if there is
        none."""
        return await asyncio.to_thread(self._format_at, path)

    def _format_at(self, path: str) -> str:
        place = local_path(path)
        try:
            there = place.exists()
        except (OSError, ValueError):
            there = False
        if not there:
            raise NotFound(f"lora_path: no adapter is at {shown(path)}", param="lora_path")
        for entry in self._formats.entries():
            form = self._formats.load(entry.name)
            with self._formats.calling(entry.name, "is_at"):
                if form.is_at(place):
                    return entry.name
        names = ", ".join(entry.name for entry in self._formats.entries())
        raise NotFound(
            f"lora_path: no adapter in a form that is known ({names}) is at {shown(path)}",
            param="lora_path",
        )

    async def resolve(self, name: str) -> str | None:
        """Return where the first resolver that knows a name says that it is. None: none knows
        it. Raises PluginError if one fails."""
        base = self._config.served_names[0]
        async with self._turns:
            for key, resolver in self._made().items():
                with self._registry.calling(key, "resolve"):
                    path = await resolver.resolve(name, base)
                if path is None:
                    continue
                if not isinstance(path, Path | str):
                    raise PluginError(
                        f"{self._registry.described(key)}: resolve returned {shown(path)}, "
                        "not a path"
                    )
                return str(path)
        return None

    def _made(self) -> dict[str, Any]:
        """Return the resolvers, by priority."""
        if self._resolvers is None:
            resolvers = {}
            for entry in self._registry.entries():
                with self._registry.calling(entry.name, "its constructor"):
                    resolvers[entry.name] = self._registry.load(entry.name)(self._config)
            self._resolvers = resolvers
        return self._resolvers
