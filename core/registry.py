"""Finds plugins, keeps their named references, and knows where each came from.

`load_plugins()` discovers the entry-point group `jackfield`, calls the registration hooks and
returns a `Plugins`: one `Registry` for each kind, and the event hooks. Nothing heavy is imported
until a name is used (`Registry.load`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any, Generic, TypeVar

import msgspec
import pluggy

from . import hooks
from .errors import PluginError

logger = logging.getLogger("jackfield.plugins")
T = TypeVar("T")

KINDS = {
    "model": "register_models",
    "attention_backend": "register_attention_backends",
    "operations": "register_operations",
    "quantization": "register_quantization",
    "reasoning_parser": "register_reasoning_parsers",
    "tool_parser": "register_tool_parsers",
    "kv_connector": "register_kv_connectors",
    "kv_compressor": "register_kv_compressors",
    "structured_backend": "register_structured_backends",
    "speculator": "register_speculators",
    "logits_processor": "register_logits_processors",
    "weight_loader": "register_weight_loaders",
    "executor": "register_executors",
    "schedule_policy": "register_schedule_policies",
    "command": "register_commands",
}


class Provenance(msgspec.Struct, frozen=True):
    """Where a plugin came from."""

    distribution: str
    version: str
    entry_point: str


class Entry(msgspec.Struct, frozen=True):
    """One registered name."""

    name: str
    reference: Any
    """`"module:attribute"`, or the object itself."""
    provenance: Provenance
    priority: int = 0
    help: str = ""


class FailedPlugin(msgspec.Struct, frozen=True):
    """A plugin that was found and left out, and why."""

    provenance: Provenance
    error: str
    traceback: str = ""


class NameConflict(PluginError):
    """Two plugins under one name: nobody can tell which one is meant, so the start stops."""


class Registry(Generic[T]):
    """Names of one kind, with lazy references."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}
        self._loaded: dict[str, T] = {}
        self._registering = Provenance("unknown", "", "")

    def add(
        self,
        name: str,
        reference: str | T,
        *,
        override: bool = False,
        priority: int = 0,
        help: str = "",
    ) -> None:
        """Register `reference` ("module:attribute", or the object) under `name`.

        Raises NameConflict if the name is taken and `override` is not set, PluginError if
        `reference` is text of another form.
        """
        if isinstance(reference, str) and reference.count(":") != 1:
            raise PluginError(f"{self.kind} {name!r}: {reference!r} is not 'module:attribute'")
        present = self._entries.get(name)
        if present is not None and not override:
            raise NameConflict(
                f"{self.kind} {name!r} is registered twice: by {present.provenance.distribution} "
                f"({present.provenance.entry_point}) and by {self._registering.distribution} "
                f"({self._registering.entry_point}); uninstall one, disable one, or register with "
                "override=True"
            )
        self._entries[name] = Entry(name, reference, self._registering, priority, help)
        self._loaded.pop(name, None)

    def load(self, name: str) -> T:
        """Import and return what is registered under `name`. Raises PluginError."""
        if name in self._loaded:
            return self._loaded[name]
        entry = self._entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PluginError(
                f"no {self.kind.replace('_', ' ')} named {name!r}{hint} "
                f"(there are: {', '.join(sorted(self._entries)) or 'none'})"
            )
        loaded = entry.reference
        if isinstance(loaded, str):
            module, _, attribute = loaded.partition(":")
            try:
                loaded = getattr(importlib.import_module(module), attribute)
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"{self.kind} {name!r} of {entry.provenance.distribution} cannot be loaded "
                    f"from {entry.reference}: {type(error).__name__}: {error}"
                ) from error
        self._loaded[name] = loaded
        return loaded  # type: ignore[no-any-return]

    def described(self, name: str) -> str:
        """What errors call a registered name: its kind, and the distribution that it is from."""
        kind = self.kind.replace("_", " ")
        entry = self._entries.get(name)
        if entry is None:
            return f"{kind} {name!r}"
        source = entry.provenance
        return f"{kind} {name!r} of {source.distribution} {source.version}".rstrip()

    def entries(self) -> list[Entry]:
        """All entries, highest priority first, then by name."""
        return sorted(self._entries.values(), key=lambda e: (-e.priority, e.name))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Plugins:
    """Every registry, and the event hooks. One for an engine; pass it, do not import it."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hooks.PROJECT)
        self.manager.add_hookspecs(hooks)
        self.registries: dict[str, Registry[Any]] = {kind: Registry(kind) for kind in KINDS}
        self.failed: list[FailedPlugin] = []
        """What could not be loaded."""
        self.unwanted: list[FailedPlugin] = []
        """What the user chose not to load."""
        self.provenance: dict[str, Provenance] = {}

    def __getitem__(self, kind: str) -> Registry[Any]:
        return self.registries[kind]

    def add_plugin(self, plugin: object, provenance: Provenance) -> None:
        """Register one plugin object and run its registration hooks.

        Raises PluginError on a name conflict or another hook API, and pluggy's own error on a
        wrong signature; the plugin is then left out whole.
        """
        refusal = _api_refusal(getattr(plugin, API_ATTRIBUTE, None))
        if refusal is not None and provenance.distribution != hooks.PROJECT:
            raise PluginError(refusal)
        saved = {kind: dict(r._entries) for kind, r in self.registries.items()}
        name = f"{provenance.distribution}:{provenance.entry_point}"
        try:
            self.manager.register(plugin, name=name)
            self.manager.check_pending()
            for kind, hook in KINDS.items():
                registry = self.registries[kind]
                registry._registering = provenance
                for impl in getattr(self.manager.hook, hook).get_hookimpls():
                    if impl.plugin_name == name:
                        impl.function(registry)
        except BaseException:
            if self.manager.has_plugin(name):
                self.manager.unregister(name=name)
            for kind, entries in saved.items():
                self.registries[kind]._entries = entries
            raise
        self.provenance[name] = provenance

    def has_listeners(self, event: str) -> bool:
        """Whether any plugin implements an event hook."""
        return bool(getattr(self.manager.hook, event).get_hookimpls())

    async def emit(self, event: str, **kwargs: Any) -> None:
        """Call an event hook; await what is awaitable. A listener's error is logged, not raised."""
        for impl in reversed(getattr(self.manager.hook, event).get_hookimpls()):
            try:
                result = impl.function(**{k: kwargs[k] for k in impl.argnames})
                if inspect.isawaitable(result):
                    await result
            except Exception:
                logger.exception("plugin %s failed in %s", impl.plugin_name, event)


def load_plugins(
    *,
    disable: Iterable[str] = (),
    only: Iterable[str] | None = None,
    extra: Iterable[object] = (),
) -> Plugins:
    """Discover and register every installed plugin.

    `disable`: entry points or distributions to leave out; one that is not installed gets a warning.
    `only`: when given (or the environment's JACKFIELD_PLUGINS is set), load just these third-party
    ones, and fail if one cannot be loaded; Jackfield's own always load. `extra`: plugin objects of
    the caller.

    Raises NameConflict when two plugins have one name, and PluginError when a plugin named in
    `only` fails or is not installed, or one of Jackfield's own fails.
    """
    plugins = Plugins()
    if only is None and os.environ.get("JACKFIELD_PLUGINS"):
        only = os.environ["JACKFIELD_PLUGINS"].split(",")
    refused = {_normal(name): name for name in disable if name.strip()}
    named = None if only is None else {_normal(n): n.strip() for n in only if n.strip()}
    found: set[str] = set()
    for entry_point, provenance in _discover():
        names = {_normal(provenance.entry_point), _normal(provenance.distribution)}
        found |= names
        own = provenance.distribution == hooks.PROJECT
        if names & refused.keys():
            plugins.unwanted.append(FailedPlugin(provenance, "disabled"))
        elif named is not None and not own and not names & named.keys():
            plugins.unwanted.append(FailedPlugin(provenance, "not among the ones asked for"))
        else:
            needed = own or (named is not None and bool(names & named.keys()))
            _add_found(plugins, entry_point, provenance, needed)
    if missing := sorted((named or {}).keys() - found):
        told = ", ".join(f"{(named or {})[name]}{_near(name, found)}" for name in missing)
        raise PluginError(f"no such plugin installed: {told}")
    for name in sorted(refused.keys() - found):
        logger.warning(
            "no plugin %s to leave out%s (give an entry point or a distribution)",
            refused[name],
            _near(name, found),
        )
    for number, plugin in enumerate(extra):
        plugins.add_plugin(plugin, Provenance("(given by the caller)", "", f"extra-{number}"))
    return plugins


def _add_found(
    plugins: Plugins, entry_point: metadata.EntryPoint, provenance: Provenance, needed: bool
) -> None:
    """Import and register one installed plugin, or note why not. Raises PluginError if `needed`."""
    try:
        plugins.add_plugin(entry_point.load(), provenance)
    except NameConflict:
        raise
    except (Exception, SystemExit) as error:
        told = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        if provenance.distribution != hooks.PROJECT:
            # What another version of the API looks like from here is often a failed import.
            told = _api_refusal(_stated_api(entry_point)) or told
        who = f"{provenance.entry_point} of {provenance.distribution} {provenance.version}"
        if needed:
            raise PluginError(f"plugin {who} failed: {told}") from error
        plugins.failed.append(FailedPlugin(provenance, told, traceback.format_exc()))
        logger.warning("plugin %s is left out: %s", who, told)


API_ATTRIBUTE = "jackfield_api"


def _api_refusal(stated: object) -> str | None:
    """Why a plugin that states this hook API cannot be used; None when it can."""
    wanted = 1 if stated is None else stated
    if type(wanted) is not int:
        return f"{API_ATTRIBUTE}: {stated!r} is no hook API version, which is a whole number"
    if wanted == hooks.API_VERSION:
        return None
    has = f"this Jackfield has {hooks.API_VERSION}"
    if wanted > hooks.API_VERSION:
        return f"it is built for hook API {wanted}, {has}: update Jackfield"
    silent = f" (it states no {API_ATTRIBUTE})" if stated is None else ""
    return f"it is built for hook API {wanted}{silent}, {has}: update the plugin"


def _stated_api(entry_point: metadata.EntryPoint) -> object:
    """What the source of a plugin that cannot be imported states as its hook API, if anything."""
    path: Any = None
    spec = None
    parts = entry_point.value.partition(":")[0].strip().split(".")
    try:
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            found = (f.find_spec(name, path) for f in sys.meta_path if hasattr(f, "find_spec"))
            spec = next(s for s in found if s is not None)
            path = spec.submodule_search_locations
        with open(spec.origin, encoding="utf-8") as file:  # type: ignore[union-attr, arg-type]
            match = re.search(rf"^{API_ATTRIBUTE}\b[^=\n]*=\s*(\d+)", file.read(), re.M)
    except (StopIteration, OSError, ValueError, TypeError, ImportError):
        return None
    return int(match[1]) if match else None


_NO_HEADERS = {"Name": "", "Version": ""}


def _discover() -> Iterator[tuple[metadata.EntryPoint, Provenance]]:
    """Entry points, Jackfield's own first, each once (a path may list a distribution twice)."""
    seen: set[tuple[str, str]] = set()
    points = []
    known: dict[int, tuple[str, str]] = {}
    """Name and version by distribution object: reading them parses a file."""
    for point in metadata.entry_points(group=hooks.PROJECT):
        if id(point.dist) not in known:
            headers: Any = (point.dist and point.dist.metadata) or _NO_HEADERS
            known[id(point.dist)] = (headers["Name"] or "unknown", headers["Version"] or "")
        provenance = Provenance(*known[id(point.dist)], point.name)
        key = (provenance.distribution, point.name)
        if key not in seen:
            seen.add(key)
            points.append((point, provenance))
    points.sort(key=lambda p: (p[1].distribution != hooks.PROJECT, p[1].distribution, p[0].name))
    return iter(points)


def _normal(name: str) -> str:
    """As package indexes compare names: `My_Plugin` is `my-plugin`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
