"""`Kit`, the base of every conformance kit: a name, and the plugins that it is looked up in."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from ...core.registry import Plugins, load_plugins

if TYPE_CHECKING:
    import torch


class Kit:
    """Subclass one of the kits, not this."""

    kind: ClassVar[str]
    """The registry's name for the kind of plugin."""
    name: ClassVar[str]
    """Registered name."""
    plugin: ClassVar[object | None] = None
    """A module or object with hookimpls that is registered besides the installed plugins, for a
    plugin that is not installed."""

    @classmethod
    def plugins(cls) -> Plugins:
        """Return the installed plugins, and `plugin`."""
        return _load(cls.plugin)

    @classmethod
    def registered(cls) -> Any:
        """Return the object registered under `name`. Raises PluginError."""
        return cls.plugins()[cls.kind].load(cls.name)


class DeviceKit(Kit):
    """A kit that runs on a GPU where there is one."""

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def _load(plugin: object | None) -> Plugins:
    return load_plugins(extra=() if plugin is None else (plugin,))
