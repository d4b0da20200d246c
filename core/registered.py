"""Names that plugins registered, and what each stands for, imported and checked when it is used."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from .contracts import violation
from .errors import JackfieldError, PluginError
from .plugin_checks import near

T = TypeVar("T")


class Provenance(msgspec.Struct, frozen=True):
    """Where a plugin came from."""

    distribution: str
    version: str
    entry_point: str

    @property
    def plugin(self) -> str:
        """What the plugin is called inside: one for each entry point."""
        return f"{self.distribution}:{self.entry_point}"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.entry_point, "of", self.distribution, self.version)))


class Entry(msgspec.Struct, frozen=True):
    """One registered name."""

    name: str
    reference: Any
    """`"module:attribute"`, or the object itself."""
    provenance: Provenance
    priority: int = 0
    help: str = ""
    final: bool = False
    """Nobody may override it."""
    override: bool = False
    """It was registered to take the place of whatever has its name."""


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
        final: bool = False,
    ) -> None:
        """Register `reference` ("module:attribute", or the object) under `name`; `final`: for
        good.

        Raises NameConflict if the name is taken and `override` is not set, PluginError if it is
        final or `reference` is text of another form.
        """
        if isinstance(reference, str) and reference.count(":") != 1:
            raise PluginError(f"{self.kind} {name!r}: {reference!r} is not 'module:attribute'")
        present = self._entries.get(name)
        if present is not None and present.final:
            raise PluginError(
                f"{self.kind} {name!r} is {present.provenance.distribution}'s own, and cannot be "
                "replaced: give yours another name"
            )
        if present is not None and not override:
            raise NameConflict(
                f"{self.kind} {name!r} is registered twice: by {present.provenance.distribution} "
                f"({present.provenance.entry_point}) and by {self._registering.distribution} "
                f"({self._registering.entry_point}); uninstall one, disable one, or register with "
                "override=True"
            )
        self._entries[name] = Entry(
            name, reference, self._registering, priority, help, final, override
        )
        self._loaded.pop(name, None)

    def load(self, name: str) -> T:
        """Import and return what is registered under `name`.

        Raises PluginError, also for what cannot be of this kind (`contracts.py`).
        """
        if name in self._loaded:
            return self._loaded[name]
        entry = self._entries.get(name)
        if entry is None:
            raise PluginError(
                f"no {self.kind.replace('_', ' ')} named {name!r}{near(name, self._entries)} "
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
        if (reason := violation(self.kind, loaded)) is not None:
            raise PluginError(
                f"{self.kind} {name!r} of {entry.provenance.distribution} is none: {reason}"
            )
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

    @contextlib.contextmanager
    def calling(self, name: str | None, what: str) -> Iterator[None]:
        """Around a call of what is registered under `name`: its errors name its distribution.

        `what`: the method, for the message. Errors of Jackfield's own classes and plugins, and of a
        device that is full, pass as they are.
        """
        try:
            yield
        except JackfieldError:
            raise
        except Exception as error:
            if (
                name is None
                or name not in self._entries
                or type(error).__name__ == "OutOfMemoryError"
            ):
                raise
            raise PluginError(
                f"{self.described(str(name))} failed in {what}: {type(error).__name__}: {error}"
            ) from error

    def entries(self) -> list[Entry]:
        """All entries, highest priority first, then by name."""
        return sorted(self._entries.values(), key=lambda e: (-e.priority, e.name))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
