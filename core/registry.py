"""Discovers plugins, and records where each came from.

`load_plugins()` discovers the entry-point group `jackfield`, calls the registration hooks and
returns a `Plugins`: one `Registry` for each kind, and the event hooks. Nothing heavy is imported
until a name is used (`Registry.load`).
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from . import hooks
from .errors import PluginError
from .registration.plugin_checks import api_refusal, near, stated_api
from .registration.plugins import (
    GIVEN,
    KINDS,
    FailedPlugin,
    LoadedPlugin,
    LoadTimer,
    Plugins,
    normal_name,
)
from .registration.registered import Entry, NameConflict, ParserMarks, Provenance, Registry

__all__ = [
    "KINDS", "Entry", "FailedPlugin", "LoadedPlugin", "NameConflict", "ParserMarks", "Plugins",
    "Provenance", "Registry", "load_plugins",
]  # fmt: skip
logger = logging.getLogger("jackfield.plugins")

BUILTIN = "builtin"
"""In a list of plugins: Jackfield's own, which are always loaded."""


def load_plugins(
    *,
    disable: Iterable[str] = (),
    only: Iterable[str] | None = None,
    extra: Iterable[object] = (),
) -> Plugins:
    """Discover and register every installed plugin.

    `disable`: entry points or distributions to leave out; a warning is logged for one that is not
    installed.
    `only`: when given (or the environment's JACKFIELD_PLUGINS is set), load just these third-party
    ones, and fail if one cannot be loaded; Jackfield's own always load, and `builtin` alone names
    no others. `extra`: plugin objects of the caller.

    Raises NameConflict when two plugins have one name (Jackfield's own families give way), and
    PluginError when a plugin named in `only` fails or is not installed, or one of Jackfield's own
    fails.
    """
    plugins = Plugins()
    if only is None and os.environ.get("JACKFIELD_PLUGINS"):
        only = os.environ["JACKFIELD_PLUGINS"].split(",")
    if only is not None:
        only = [name for name in only if normal_name(name) != BUILTIN]
    disabled = {normal_name(name): name for name in disable if name.strip()}
    selected = None if only is None else {normal_name(n): n.strip() for n in only if n.strip()}
    known_names: set[str] = set()
    for entry_point, provenance in _discover():
        names = {normal_name(provenance.entry_point), normal_name(provenance.distribution)}
        known_names |= names
        own = provenance.distribution == hooks.PROJECT
        if names & disabled.keys():
            plugins.unwanted.append(FailedPlugin(provenance, "disabled"))
        elif selected is not None and not own and not names & selected.keys():
            plugins.unwanted.append(FailedPlugin(provenance, "not among the selected ones"))
        else:
            required = own or (selected is not None and bool(names & selected.keys()))
            _add_found(plugins, entry_point, provenance, required)
    if missing := sorted((selected or {}).keys() - known_names):
        listing = ", ".join(
            f"{(selected or {})[name]}{near(name, known_names)}" for name in missing
        )
        raise PluginError(f"no such plugin installed: {listing}")
    for name in sorted(disabled.keys() - known_names):
        logger.warning(
            "no plugin %s to leave out%s (give an entry point or a distribution)",
            disabled[name],
            near(name, known_names),
        )
    for number, plugin in enumerate(extra):
        provenance = Provenance(GIVEN, "", f"extra-{number}")
        plugins.add_plugin(plugin, provenance)
        plugins.required.add(provenance.plugin)
    return plugins


def _add_found(
    plugins: Plugins, entry_point: metadata.EntryPoint, provenance: Provenance, required: bool
) -> None:
    """Import and register an installed plugin, or note the failure. Raises PluginError if
    `required`.
    """
    timer = LoadTimer()
    try:
        plugins.add_plugin(entry_point.load(), provenance, timer=timer)
        if required:
            plugins.required.add(provenance.plugin)
    except NameConflict:
        raise
    except (Exception, SystemExit) as error:
        message = (
            str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        )
        if provenance.distribution != hooks.PROJECT and not isinstance(error, PluginError):
            # A plugin for another version of the API often fails to import.
            stated = stated_api(entry_point)
            refusal = None if stated is None else api_refusal(stated)
            message = message if refusal is None else f"{refusal} ({message})"
        if required:
            raise PluginError(f"plugin {provenance} failed: {message}") from error
        plugins.failed.append(FailedPlugin(provenance, message, traceback.format_exc()))
        logger.warning("plugin %s is left out: %s", provenance, message)


_NO_HEADERS = {"Name": "", "Version": ""}


def _discover() -> Iterator[tuple[metadata.EntryPoint, Provenance]]:
    """Return unique entry points, Jackfield's own first (a path may list a distribution twice)."""
    seen: set[tuple[str, str]] = set()
    points = []
    sources: dict[int, tuple[str, str]] = {}
    """Distribution object → name and version, as reading them parses a file."""
    for point in metadata.entry_points(group=hooks.PROJECT):
        if id(point.dist) not in sources:
            headers: Any = (point.dist and point.dist.metadata) or _NO_HEADERS
            sources[id(point.dist)] = (headers["Name"] or "unknown", headers["Version"] or "")
        provenance = Provenance(*sources[id(point.dist)], point.name)
        key = (provenance.distribution, point.name)
        if key not in seen:
            seen.add(key)
            points.append((point, provenance))
    points.sort(key=lambda p: (p[1].distribution != hooks.PROJECT, p[1].distribution, p[0].name))
    return iter(points)
