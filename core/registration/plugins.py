"""`Plugins`: the registries of one engine, its event hooks, and which plugins are in use."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import pluggy

from .. import hook_versions, hooks
from ..errors import ConfigError, PluginError
from .plugin_checks import (
    API_ATTRIBUTE,
    api_refusal,
    check_hooks,
    near,
    remarks,
)
from .plugin_options import FIELD, typed_options
from .registered import Provenance, Registry

logger = logging.getLogger("jackfield.plugins")
S = TypeVar("S", bound=msgspec.Struct)

GIVEN = "(given by the caller)"
"""In place of the distribution of a plugin object that was not installed."""
TURNED_ON = " (by its options)"
"""After a plugin's name: the object that its `options_ready` returned."""
KINDS = {
    "model": "register_models",
    "config": "register_configs",
    "checkpoint_format": "register_checkpoint_formats",
    "options": "register_options",
    "attention_backend": "register_attention_backends",
    "latent_attention_backend": "register_latent_attention_backends",
    "operations": "register_operations",
    "quantization": "register_quantization",
    "reasoning_parser": "register_reasoning_parsers",
    "tool_parser": "register_tool_parsers",
    "kv_connector": "register_kv_connectors",
    "kv_compressor": "register_kv_compressors",
    "speculator": "register_speculators",
    "structured_backend": "register_structured_backends",
    "logits_processor": "register_logits_processors",
    "part": "register_parts",
    "media_model": "register_media_models",
    "adapter_format": "register_adapter_formats",
    "adapter_resolver": "register_adapter_resolvers",
    "weight_loader": "register_weight_loaders",
    "executor": "register_executors",
    "collectives": "register_collectives",
    "all2all_backend": "register_all2all_backends",
    "schedule_policy": "register_schedule_policies",
    "command": "register_commands",
}


class FailedPlugin(msgspec.Struct, frozen=True):
    """A plugin that was found but not loaded, and the reason."""

    provenance: Provenance
    error: str
    traceback: str = ""


class LoadedPlugin(msgspec.Struct, frozen=True):
    """A plugin that is in use."""

    provenance: Provenance
    seconds: float = 0.0
    """Seconds that importing and registering it took."""
    heavy: tuple[str, ...] = ()
    """Packages of HEAVY that were first imported by it."""
    remarks: tuple[str, ...] = ()
    """Warnings for its author."""


HEAVY = ("flashinfer", "scipy", "sklearn", "tensorflow", "torch", "transformers", "triton", "vllm")
"""Packages that take long to import: a plugin's entry point is imported at every start."""


class Plugins:
    """All registries, and the event hooks. One instance per engine; pass it as an argument."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hooks.PROJECT)
        self.manager.add_hookspecs(hooks)
        self.registries: dict[str, Registry[Any]] = {kind: Registry(kind) for kind in KINDS}
        self.failed: list[FailedPlugin] = []
        """Plugins that could not be loaded, or were left out later."""
        self.unwanted: list[FailedPlugin] = []
        """Plugins that the user disabled."""
        self.loaded: dict[str, LoadedPlugin] = {}
        """Plugins in use, by `Provenance.plugin`."""
        self.required: set[str] = set()
        """Plugins whose failure stops the start: Jackfield's own, and those that the user named."""
        self._options: dict[str, msgspec.Struct] = {}
        """Option schemas by name in `plugin_options`."""
        self._options_given: Mapping[str, Any] | None = None

    def __getitem__(self, kind: str) -> Registry[Any]:
        return self.registries[kind]

    @property
    def provenance(self) -> dict[str, Provenance]:
        """Where each plugin in use came from."""
        return {name: plugin.provenance for name, plugin in self.loaded.items()}

    @property
    def outside(self) -> tuple[str, ...]:
        """Entry points of the installed plugins in use that are not Jackfield's own, for other
        processes to load. Objects that the caller has given cannot be loaded there."""
        own = (hooks.PROJECT, GIVEN)
        return tuple(
            provenance.entry_point
            for provenance in self.provenance.values()
            if provenance.distribution not in own
        )

    def add_plugin(
        self, plugin: object, provenance: Provenance, *, timer: LoadTimer | None = None
    ) -> None:
        """Register one plugin object and run its registration hooks.

        `began`: the state from before it was imported. Raises PluginError on a name conflict,
        another hook API or a hook that cannot run, and pluggy's own error on a wrong signature;
        nothing of the plugin is then registered.
        """
        timer = timer or LoadTimer()
        own = provenance.distribution == hooks.PROJECT
        stated = getattr(plugin, API_ATTRIBUTE, None)
        refusal = api_refusal(stated, plugin)
        if refusal is not None and not own:
            raise PluginError(refusal)
        check_hooks(plugin)
        saved = {kind: dict(r._entries) for kind, r in self.registries.items()}
        name = provenance.plugin
        try:
            self.manager.register(plugin, name=name)
            self.manager.check_pending()
            has_model = False
            for kind, hook in KINDS.items():
                registry = self.registries[kind]
                registry._registering = provenance
                registry._registering_api = hook_versions.API_VERSION if own else stated or 1
                registry._is_partial = kind != "model" and not has_model
                for impl in self.implementations(hook, name):
                    if inspect.iscoroutine(result := impl.function(registry)):
                        result.close()
                        raise PluginError(f"{hook}: it returns a coroutine, which is never awaited")
                    if kind == "model":
                        entries = registry._entries.values()
                        has_model = any(entry.provenance == provenance for entry in entries)
        except BaseException:
            if self.manager.has_plugin(name):
                self.manager.unregister(name=name)
            for kind, before in saved.items():
                self.registries[kind]._entries = before
            raise
        notes = list(remarks(plugin))
        callers = self.manager.get_hookcallers(self.manager.get_plugin(name)) or ()
        if not callers:
            notes.append("it has no hooks (functions marked @hookimpl), so it plugs in nothing")
        elif not self._has_effect(name, [caller.name for caller in callers]):
            notes.append("it registers no name and listens to no event, so it plugs in nothing")
        self.loaded[name] = timer.ended(provenance, () if own else tuple(notes))
        for remark in () if own else notes:
            logger.warning("plugin %s: %s", provenance, remark)

    def configure(self, options: Mapping[str, Any]) -> None:
        """Check `EngineConfig.plugin_options` and pass every plugin its own (`options_ready`).

        Done once for equal options. Raises ConfigError for options that do not fit a plugin's
        schema, and PluginError if a plugin that was given options fails.
        """
        if options == self._options_given:
            return
        registry = self.registries["options"]
        for name in options:
            if name not in registry:
                raise ConfigError(
                    f"{FIELD}.{name}: no plugin takes options under this name"
                    f"{near(name, registry)} (there are: {', '.join(sorted(registry)) or 'none'})"
                    f"{self._left_out(name)}",
                    param=f"{FIELD}.{name}",
                )
        for entry in registry.entries():
            try:
                typed = typed_options(entry.name, registry.load(entry.name),
                                     options.get(entry.name, {}))  # fmt: skip
                self._options[entry.name] = typed
                for impl in self.implementations("options_ready", entry.provenance.plugin):
                    more = self.call(impl, options=typed)
                    self._turn_on(entry.provenance, more)
            except ConfigError:
                raise
            except (Exception, SystemExit) as error:
                if entry.name in options:
                    self.required.add(entry.provenance.plugin)
                self.remove(entry.provenance, "options_ready", error)
        self._options_given = dict(options)

    def _turn_on(self, provenance: Provenance, more: object) -> None:
        """Replace what a plugin's options had turned on. None: nothing."""
        name = f"{provenance.plugin}{TURNED_ON}"
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)
        if more is not None:
            check_hooks(more)
            self.manager.register(more, name=name)
            self.manager.check_pending()

    def _left_out(self, name: str) -> str:
        """Return why a plugin is not loaded, if known."""
        for plugin in (*self.failed, *self.unwanted):
            where = plugin.provenance
            if normal_name(name) in (
                normal_name(where.entry_point),
                normal_name(where.distribution),
            ):
                return f"; plugin {where} is left out: {plugin.error}"
        return ""

    def options(self, schema: type[S]) -> S:
        """Return a plugin's options as an instance of its registered class. Raises PluginError if
        no plugin registered that class, or the engine has not been created yet."""
        for options in self._options.values():
            if isinstance(options, schema):
                return options
        raise PluginError(f"no plugin of this engine has options of the class {schema.__name__}")

    def remove(self, provenance: Provenance, hook: str, error: BaseException) -> None:
        """Unload a plugin: remove all its names and hooks.

        Raises PluginError if the plugin is `required`.
        """
        self._note_failure(provenance, hook, error, "and is left out")
        for registry in self.registries.values():
            for entry in registry.entries():
                if entry.provenance == provenance:
                    del registry._entries[entry.name]
                    registry._loaded.pop(entry.name, None)
        self._turn_on(provenance, None)
        self.manager.unregister(name=provenance.plugin)
        del self.loaded[provenance.plugin]

    def implementations(self, hook: str, plugin: str | None = None) -> list[pluggy.HookImpl]:
        """Return the implementations of a hook in order of registration; of one plugin alone, if it
        is given."""
        impls = getattr(self.manager.hook, hook).get_hookimpls()
        return [impl for impl in impls if plugin in (None, impl.plugin_name)]

    def source(self, impl: pluggy.HookImpl) -> Provenance:
        """Return the provenance of a hook's plugin; "unknown" for one put into `manager`
        directly."""
        plugin = self.loaded.get(impl.plugin_name.removesuffix(TURNED_ON))
        return Provenance("unknown", "", impl.plugin_name) if plugin is None else plugin.provenance

    def _has_effect(self, plugin: str, used: Iterable[str]) -> bool:
        """Return whether the plugin registered a name, or uses a hook that is called later."""
        return any(hook not in KINDS.values() for hook in used) or any(
            entry.provenance.plugin == plugin
            for registry in self.registries.values()
            for entry in registry._entries.values()
        )

    def fail(self, impl: pluggy.HookImpl, hook: str, error: BaseException) -> None:
        """Record that a plugin's hook has raised: log it by name, and note it for `jackfield
        plugins`. What the hook would have added is left out.

        Raises PluginError if that plugin is `required`.
        """
        provenance = self.source(impl)
        self._note_failure(provenance, hook, error, "which is left out")

    def _note_failure(
        self, provenance: Provenance, hook: str, error: BaseException, cost: str
    ) -> None:
        message = (
            str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        )
        if provenance.plugin in self.required:
            raise PluginError(f"plugin {provenance} failed in {hook}: {message}") from error
        logger.error(
            "plugin %s failed in %s, %s: %s", provenance, hook, cost, message, exc_info=error
        )
        text = "".join(traceback.format_exception(error))
        self.failed.append(FailedPlugin(provenance, f"{hook}: {message}", text))

    def has_listeners(self, event: str) -> bool:
        """Return whether any plugin implements an event hook."""
        return bool(self.implementations(event))

    @staticmethod
    def call(impl: pluggy.HookImpl, **arguments: Any) -> Any:
        """Call one implementation with those of the hook's arguments that it takes."""
        return impl.function(**{name: arguments[name] for name in impl.argnames})

    def emit_now(self, event: str, **arguments: Any) -> None:
        """Call an event hook that is not async. A listener's error is logged, not raised."""
        for _ in self._results(event, arguments):
            pass

    async def emit(self, event: str, **arguments: Any) -> None:
        """Call an event hook, and await awaitable results. A listener's error is logged, not
        raised."""
        for impl, result in self._results(event, arguments):
            if inspect.isawaitable(result):
                with _logged(impl, event):
                    await result

    def _results(
        self, event: str, arguments: Mapping[str, Any]
    ) -> Iterator[tuple[pluggy.HookImpl, Any]]:
        """Call each listener in turn, the last one registered first."""
        for impl in reversed(self.implementations(event)):
            with _logged(impl, event):
                yield impl, self.call(impl, **arguments)


@contextlib.contextmanager
def _logged(impl: pluggy.HookImpl, event: str) -> Iterator[None]:
    """Log a listener's error, and suppress it."""
    try:
        yield
    except (Exception, SystemExit):
        logger.exception("plugin %s failed in %s", impl.plugin_name, event)


def normal_name(name: str) -> str:
    """Normalize a name as package indexes do: `My_Plugin` is `my-plugin`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


class LoadTimer:
    """Time and imported modules before a plugin's import."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self._present = {name for name in HEAVY if name in sys.modules}

    def ended(self, provenance: Provenance, notes: tuple[str, ...]) -> LoadedPlugin:
        """Return the registered plugin's record."""
        seconds = time.perf_counter() - self._at
        new = tuple(name for name in HEAVY if name in sys.modules and name not in self._present)
        if new and provenance.distribution != hooks.PROJECT:
            logger.warning(
                "plugin %s imports %s at every start (%.2f s): register references as "
                "'module:attribute' and import there",
                provenance, ", ".join(new), seconds,
            )  # fmt: skip
        return LoadedPlugin(provenance, seconds, new, notes)
