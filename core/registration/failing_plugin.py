"""Attributes an error in a step to the plugin whose code raised it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import JackfieldError, PluginError
from ..hooks import PROJECT
from .registered import Entry

if TYPE_CHECKING:
    from ..registry import Plugins


class _Suspect(msgspec.Struct, frozen=True):
    described: str
    kind: Any
    """The registered class, or factory."""
    modules: frozenset[str]
    """Modules that define it and its plugin."""
    package: str
    """The plugin's package, or ""."""

    def share(self, frame: FrameType) -> int:
        """Return how strongly a frame matches the plugin's code."""
        if isinstance(self.kind, type) and isinstance(frame.f_locals.get("self"), self.kind):
            return 1_000_000
        module = str(frame.f_globals.get("__name__", ""))
        if module not in self.modules and module.partition(".")[0] != self.package:
            return 0
        return 1 + max(_num_shared(module, other) for other in self.modules)


def plugin_failure(plugins: Plugins, error: BaseException, doing: str) -> PluginError | None:
    """Return the error naming an installed plugin's distribution, in place of its error; None for
    Jackfield's own errors, and the device's out-of-memory. `doing`: "a step".
    """
    if isinstance(error, JackfieldError) or type(error).__name__ == "OutOfMemoryError":
        return None
    plugin = failing_plugin(plugins, error)
    if plugin is None:
        return None
    return PluginError(f"{plugin} failed in {doing}: {type(error).__name__}: {error}")


def failing_plugin(plugins: Plugins, error: BaseException) -> str | None:
    """Return the plugin whose code, or class's method, was called last before the error, or
    None.
    """
    suspects = list(_suspects(plugins))
    while error.__cause__ is not None:
        error = error.__cause__
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))) if suspects else ():
        shares = [suspect.share(frame) for suspect in suspects]
        if any(shares):
            return suspects[shares.index(max(shares))].described
    return None


def _suspects(plugins: Plugins) -> Iterator[_Suspect]:
    for registry in plugins.registries.values():
        for name, kind in registry.in_use().items():
            entry: Entry = registry.entry(name)
            if PROJECT in (entry.provenance.distribution, _module(kind).partition(".")[0]):
                continue  # Our own, also where another plugin registers it once more.
            plugin = _module(plugins.manager.get_plugin(entry.provenance.plugin))
            package = plugin.partition(".")[0]
            yield _Suspect(
                registry.described(name),
                kind,
                frozenset({_module(kind), plugin} - {""}),
                "" if package == PROJECT else package,
            )


def _module(thing: Any) -> str:
    """Return the module of a class, function or object."""
    if isinstance(thing, type(traceback)):
        return thing.__name__
    return str(getattr(thing, "__module__", None) or "")


def _num_shared(module: str, other: str) -> int:
    """Return the common leading parts of dotted names."""
    count = 0
    for left, right in zip(module.split("."), other.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count
