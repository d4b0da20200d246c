"""Checks a plugin before use: hook API, and ineffective hooks."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from .. import hook_versions, hooks
from ..errors import PluginError
from ..spelling import nearest

API_ATTRIBUTE = "jackfield_api"
MARK = f"{hooks.PROJECT}_impl"
"""Attribute set by `@hookimpl`."""
HOOKS = frozenset(name for name, value in vars(hooks).items() if hasattr(value, "jackfield_spec"))


def check_hooks(plugin: object) -> None:
    """Refuse ineffective marked functions. Raises PluginError."""
    for name, hook, function in _implementations(plugin):
        if hook not in HOOKS:
            if getattr(function, MARK).get("optionalhook"):
                continue
            raise PluginError(f"{name}: there is no such hook{near(hook, HOOKS)}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise PluginError(f"{name}: it yields, and hooks are called, not iterated over")
        if inspect.iscoroutinefunction(function) and not may_be_async(hook):
            raise PluginError(
                f"{name}: it is `async def`, and nothing awaits this hook: make it `def`"
            )


def _implementations(plugin: object) -> Iterator[tuple[str, str, Any]]:
    """Return a plugin's marked functions: name, hook, function."""
    for name, function in _functions(plugin):
        options = getattr(function, MARK, None)
        if options is not None:
            yield name, options.get("specname") or name, function


def may_be_async(hook: str) -> bool:
    return not hook.startswith(("register_", "kv_cache_")) and hook != "options_ready"


def remarks(plugin: object) -> Iterator[str]:
    """Return warnings: functions that look like hooks but are never called."""
    for name, function in _functions(plugin):
        if hasattr(function, MARK):
            continue
        if name in HOOKS:
            yield f"{name} has no @hookimpl, so it is not called"
        elif name.startswith("register_") and (hint := near(name, HOOKS)):
            yield f"{name} is no hook and has no @hookimpl, so it is not called{hint}"


def _functions(plugin: object) -> Iterator[tuple[str, Any]]:
    holder = plugin if isinstance(plugin, type | types.ModuleType) else type(plugin)
    for name in dir(plugin):
        if name.startswith("_"):
            continue
        if isinstance(getattr(holder, name, None), property):
            continue  # Reading a property runs the plugin's code.
        try:
            value = getattr(plugin, name)
        except Exception:
            continue
        if inspect.isroutine(value):
            yield name, value


def near(name: str, names: Iterable[str]) -> str:
    match = nearest(name, names)
    return f"; did you mean {match!r}?" if match else ""


# ---------------------------------------------------------------- hook API


def api_refusal(stated: object, plugin: object = None) -> str | None:
    """Return why a plugin with this hook API is unusable, or None.

    plugin: None if it cannot be imported.
    """
    version = 1 if stated is None else stated
    if type(version) is not int:
        return f"{API_ATTRIBUTE}: {stated!r} is no hook API version, which is a whole number"
    if version == hook_versions.API_VERSION:
        return None
    has = f"this Jackfield has {hook_versions.API_VERSION}"
    if version > hook_versions.API_VERSION:
        return f"it is built for hook API {version}, {has}: update Jackfield"
    built = f"it is built for hook API {version}, {has}"
    update = "update the plugin"
    if stated is None:
        built = f"it states no {API_ATTRIBUTE}, which counts as hook API {version}, and {has}"
        place = "" if plugin is None else f" in {_place(plugin)}"
        update = (
            f"if it is written for that, set {API_ATTRIBUTE} = {hook_versions.API_VERSION}{place}, "
            f"else {update}"
        )
    if plugin is None or version < 1:
        return f"{built}: {update}"
    since = {
        hook: newer
        for newer in range(version + 1, hook_versions.API_VERSION + 1)
        for hook in hook_versions.CHANGED_HOOKS.get(newer, ())
    }
    used = {hook for _, hook, _ in _implementations(plugin)}
    changed = [f"{hook} (in {since[hook]})" for hook in sorted(used & since.keys())]
    return f"{built}, which changed {', '.join(changed)}: {update}" if changed else None


def _place(plugin: object) -> str:
    """Return where a plugin's attributes are set, for messages."""
    if isinstance(plugin, types.ModuleType):
        return f"module {plugin.__name__}"
    cls = plugin if isinstance(plugin, type) else type(plugin)
    return f"class {cls.__module__}.{cls.__qualname__}"


def stated_api(entry_point: metadata.EntryPoint) -> object:
    """Read the hook API from an unimportable plugin's source, or None."""
    path: Any = None
    spec = None
    parts = entry_point.value.partition(":")[0].strip().split(".")
    try:
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            specs = (f.find_spec(name, path) for f in sys.meta_path if hasattr(f, "find_spec"))
            spec = next(s for s in specs if s is not None)
            path = spec.submodule_search_locations
        with open(spec.origin, encoding="utf-8") as file:  # type: ignore[union-attr, arg-type]
            match = re.search(rf"^{API_ATTRIBUTE}\b[^=\n]*=\s*(\d+)", file.read(), re.M)
    except (StopIteration, OSError, ValueError, TypeError, ImportError):
        return None
    return int(match[1]) if match else None
