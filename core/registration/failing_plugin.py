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
    """A registered name of an installed plugin that is in use."""

    described: str
    kind: Any
    """The registered object: a class, or a factory of the objects that are called."""
    modules: frozenset[str]
    """Modules that define it and its plugin."""
    package: str
    """The plugin's package: all code in it is the plugin's; "" if it is not known."""

    def share(self, frame: FrameType) -> int:
        """Return how strongly this frame matches the plugin's code; 0: not at all."""
        if isinstance(self.kind, type) and isinstance(frame.f_locals.get("self"), self.kind):
            return 1_000_000
        module = str(frame.f_globals.get("__name__", ""))
        if module not in self.modules and module.partition(".")[0] != self.package:
            return 0
        return 1 + max(_num_shared(module, other) for other in self.modules)


def plugin_failure(plugins: Plugins, error: BaseException, doing: str) -> PluginError | None:
    """Return the error to raise in place of one from an installed plugin, naming its distribution;
    None for errors of Jackfield's own code and plugins, of its own classes, and for out-of-memory
    errors of the device. `doing`: "a step"."""
    if isinstance(error, JackfieldError) or type(error).__name__ == "OutOfMemoryError":
        return None
    plugin = failing_plugin(plugins, error)
    if plugin is None:
        return None
    return PluginError(f"{plugin} failed in {doing}: {type(error).__name__}: {error}")


def failing_plugin(plugins: Plugins, error: BaseException) -> str | None:
    """Return the name of the failing plugin for messages: the one whose code, or a method of whose
    class, was called last before the error. None if only code of Jackfield and its libraries was
    running.
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
    """Return a module's own name, or the module that defines a class, function or object."""
    if isinstance(thing, type(traceback)):
        return thing.__name__
    return str(getattr(thing, "__module__", None) or "")


def _num_shared(module: str, other: str) -> int:
    """Return the number of leading parts that two dotted names have in common."""
    count = 0
    for left, right in zip(module.split("."), other.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count
