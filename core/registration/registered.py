"""Registered names, imported and checked on first use."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import JackfieldError, PluginError
from ..hook_versions import API_VERSION
from ..hooks import PROJECT
from .contracts import completed, violation
from .plugin_checks import near

T = TypeVar("T")
logger = logging.getLogger("jackfield.plugins")


class Provenance(msgspec.Struct, frozen=True):
    distribution: str
    version: str
    entry_point: str

    @property
    def plugin(self) -> str:
        """Internal name, one per entry point."""
        return f"{self.distribution}:{self.entry_point}"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.entry_point, "of", self.distribution, self.version)))


class ParserMarks(msgspec.Struct, frozen=True, kw_only=True):
    """What `auto` knows a parser's dialect by, in a checkpoint."""

    marks: tuple[str, ...] = ()
    """Texts that a chat template has whose model writes what the parser reads."""
    model_types: tuple[str, ...] = ()
    """The only model types whose templates are recognized by `marks`; (): any."""
    other_marks: tuple[str, ...] = ()
    """Texts that another template of such models has, whatever their type."""
    declaration: str = ""
    """The field of tokenizer_config.json in which a checkpoint declares what it writes, if the
    parser goes by that."""


NO_MARKS = ParserMarks()
EXTRAS: dict[str, type[msgspec.Struct]] = {
    "reasoning_parser": ParserMarks,
    "tool_parser": ParserMarks,
}
"""Kind → type of `Entry.extra`."""


class Entry(msgspec.Struct, frozen=True):
    name: str
    reference: Any
    """`"module:attribute"`, or an object."""
    provenance: Provenance
    priority: int = 0
    help: str = ""
    final: bool = False
    override: bool = False
    """Whether it replaces an entry of the same name."""
    aliases: tuple[str, ...] = ()
    """Other names, of executors and parsers."""
    extra: Any = None
    """Data of this kind (`EXTRAS`)."""
    api: int = API_VERSION
    """Its plugin's hook API version."""

    @property
    def parser_marks(self) -> ParserMarks:
        """A parser's marks for `auto`."""
        return self.extra if isinstance(self.extra, ParserMarks) else NO_MARKS


def _imported(reference: str) -> Any:
    """Return what "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


class NameConflict(PluginError):
    """Two plugins registered the same name. The name is ambiguous, so the start stops."""


class Registry(Generic[T]):
    """Registered names of one kind, with lazy references."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}
        self._loaded: dict[str, T] = {}
        self._refusals: dict[str, str] = {}
        self._text_parts: dict[str, str] = {}
        self._text_types: dict[str, str] = {}
        self._derivations: dict[tuple[str, str], str] = {}
        """Suffix of names, and that of what they derive from → the maker."""
        self._registering = Provenance("unknown", "", "")
        self._registering_api = API_VERSION
        self._is_partial = False
        """Whether the current plugin lacks a model, so is no family of its own."""

    def add(
        self,
        name: str,
        reference: str | T,
        *,
        override: bool = False,
        priority: int = 0,
        help: str = "",
        final: bool = False,
        aliases: tuple[str, ...] = (),
        extra: msgspec.Struct | None = None,
        **older: Any,
    ) -> None:
        """Register `reference` ("module:attribute", or the object) under `name`; `final`: it cannot
        be overridden; `aliases`: other names that an option may have for an attention backend,
        an executor or a parser; `extra`: what this kind alone has, such as `ParserMarks`; `older`:
        fields of it, as older plugins have them.

        The names of a plugin with a model go before Jackfield's own, with a warning if `override`
        is not set: Jackfield may have adopted the family later than the plugin. Otherwise raises
        NameConflict if the name is taken and `override` is not set, PluginError if it is final or
        `reference` is text of another form.
        """
        if isinstance(reference, str) and reference.count(":") != 1:
            raise PluginError(f"{self.kind} {name!r}: {reference!r} is not 'module:attribute'")
        extra = self._extra(name, extra, older)
        present = self._entries.get(name)
        if present is not None and present.final:
            raise PluginError(
                f"{self.kind} {name!r} is {present.provenance.distribution}'s own, and cannot be "
                "replaced: give yours another name"
            )
        if present is not None and not override and self._gives_way(present):
            logger.warning(
                "%s %r of plugin %s takes the place of Jackfield's own of that name; to use that "
                "one, leave the plugin out (--no-plugin %s); its author confirms the choice with "
                "override=True",
                self.kind, name, self._registering, self._registering.entry_point,
            )  # fmt: skip
            override = True
        if present is not None and not override:
            raise NameConflict(
                f"{self.kind} {name!r} is registered twice: by {present.provenance.distribution} "
                f"({present.provenance.entry_point}) and by {self._registering.distribution} "
                f"({self._registering.entry_point}); uninstall one, leave one out (--no-plugin), "
                "or register with override=True"
            )
        self._entries[name] = Entry(
            name, reference, self._registering, priority, help, final, override, aliases, extra,
            self._registering_api,
        )  # fmt: skip
        self._loaded.pop(name, None)

    def _extra(
        self, name: str, extra: msgspec.Struct | None, older: dict[str, Any]
    ) -> msgspec.Struct | None:
        """Return an entry's `extra`, maybe from older arguments."""
        kind = EXTRAS.get(self.kind)
        if older:
            unknown = older.keys() - (set(kind.__struct_fields__) if kind else set())
            if unknown or extra is not None or kind is None:
                wrong = ", ".join(sorted(unknown or older))
                raise TypeError(f"{self.kind} {name!r}: add() takes no argument {wrong} here")
            extra = kind(**older)
            warnings.warn(
                f"{self.kind} {name!r}: {', '.join(older)} belong into extra={kind.__name__}(…); "
                "as arguments of their own they go with the next API version",
                DeprecationWarning, stacklevel=3,
            )  # fmt: skip
        if extra is not None and (kind is None or not isinstance(extra, kind)):
            raise PluginError(
                f"{self.kind} {name!r}: extra is {type(extra).__name__}, and takes "
                f"{kind.__name__ if kind else 'nothing'}"
            )
        return extra

    def _gives_way(self, present: Entry) -> bool:
        """Whether Jackfield's own entry yields to the new one."""
        own = present.provenance.distribution == PROJECT
        return own and self._registering.distribution != PROJECT and not self._is_partial

    def refuse(self, name: str, reason: str) -> None:
        """Say in one clause why nothing is registered under a name, for the error of who asks for
        it. A plugin may still register something there."""
        self._refusals[name] = reason

    def refusal(self, name: str) -> str | None:
        """Return the reason of `refuse`; None where none was given, or the name is registered."""
        return None if name in self._entries else self._refusals.get(name)

    def add_text_part(self, name: str, of: str = "") -> None:
        """Say that of a multimodal architecture the text part is served: by the architecture `of`;
        "": by the one of its text configuration's type (`add_text_type`, or in `transformers`), or
        that this names. A plugin may still register the whole."""
        self._text_parts[name] = of

    def add_text_type(self, model_type: str, of: str) -> None:
        """Say that a text configuration of a type is served as the architecture `of`, whatever
        multimodal architecture it is in."""
        self._text_types[model_type] = of

    @property
    def text_types(self) -> Mapping[str, str]:
        """Type of a text configuration → architecture, as `add_text_type` has said."""
        return MappingProxyType(self._text_types)

    def text_part(self, name: str) -> str | None:
        """Return what `add_text_part` has said; None for what is registered itself, or
        unknown."""
        return None if name in self._entries else self._text_parts.get(name)

    def derive(self, suffix: str, of: str, maker: str) -> None:
        """Say that a name with `suffix` that is not registered stands for what `maker`
        ("module:function") returns for the name and what is registered with `of` in the suffix's
        place."""
        self._derivations[suffix, of] = maker

    def _derivation(self, name: str) -> tuple[str, str] | None:
        """Return from which registered name, and by what, `name` is made; None: it is not."""
        if name in self._entries or name in self._refusals or name in self._text_parts:
            return None
        for (suffix, of), maker in self._derivations.items():
            base = name.removesuffix(suffix)
            if base != name and base + of in self._entries:
                return base + of, maker
        return None

    @property
    def text_parts(self) -> dict[str, str]:
        """Multimodal architectures that are not registered themselves → the `text_part` of each."""
        return {n: of for n, of in sorted(self._text_parts.items()) if n not in self._entries}

    @property
    def refused(self) -> tuple[str, ...]:
        """Names that are not registered for a reason."""
        return tuple(sorted(name for name in self._refusals if name not in self._entries))

    def load(self, name: str) -> T:
        """Import and return what is registered under `name`.

        Raises PluginError, also for an object that cannot be of this kind (`contracts.py`).
        """
        name = self.canonical(name)
        if name in self._loaded:
            return self._loaded[name]
        if (derivation := self._derivation(name)) is not None:
            base, maker = derivation
            derived = _imported(maker)(name, self.load(base))
            self._loaded[name] = completed(self.kind, derived)
            return self._loaded[name]
        entry = self._entries.get(name)
        if entry is None:
            names = ", ".join(sorted(self._entries)) or "none"
            reason = self.refusal(name)
            raise PluginError(
                f"no {self.kind.replace('_', ' ')} named {name!r}"
                + (f"{near(name, self._entries)} (there are: {names})" if reason is None
                   else f": {reason}")
            )  # fmt: skip
        reference = entry.reference
        if isinstance(reference, str):
            try:
                reference = _imported(reference)
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"{self.kind} {name!r} of {entry.provenance.distribution} cannot be loaded "
                    f"from {entry.reference}: {type(error).__name__}: {error}"
                ) from error
        if (reason := violation(self.kind, reference)) is not None:
            raise PluginError(
                f"{self.kind} {name!r} of {entry.provenance.distribution} is none: {reason}"
            )
        self._loaded[name] = completed(self.kind, reference)
        return self._loaded[name]

    def bind(self, name: str, thing: T) -> None:
        """Let `load` return `thing` for a registered name: what was made from the object there for
        this engine's checkpoint."""
        self._loaded[name] = thing

    def canonical(self, name: str) -> str:
        """Return the registered name that `name` is an alias of; any other name as it is."""
        if name in self._entries:
            return name
        return next((entry.name for entry in self.entries() if name in entry.aliases), name)

    def in_use(self) -> dict[str, T]:
        """Objects imported so far, by name."""
        return dict(self._loaded)

    def entry(self, name: str) -> Entry:
        """Return the entry of a name, or of what it derives from. Raises KeyError if it is not
        registered."""
        derivation = self._derivation(name)
        return self._entries[name if derivation is None else derivation[0]]

    def described(self, name: str) -> str:
        """Return a registered name's description for errors: its kind and its distribution."""
        kind = self.kind.replace("_", " ")
        if name not in self:
            return f"{kind} {name!r}"
        source = self.entry(name).provenance
        return f"{kind} {name!r} of {source.distribution} {source.version}".rstrip()

    @contextlib.contextmanager
    def calling(self, name: str | None, what: str) -> Iterator[None]:
        """Context for a call of the plugin registered under `name`: its errors name its
        distribution.

        `what`: the method, for the message. Errors of Jackfield's own classes and plugins, and
        out-of-memory errors of the device, pass unchanged.
        """
        try:
            yield
        except JackfieldError:
            raise
        except Exception as error:
            if name is None or name not in self or type(error).__name__ == "OutOfMemoryError":
                raise
            raise PluginError(
                f"{self.described(str(name))} failed in {what}: {type(error).__name__}: {error}"
            ) from error

    def entries(self) -> list[Entry]:
        """Return all entries, highest priority first, then by name."""
        return sorted(self._entries.values(), key=lambda e: (-e.priority, e.name))

    def __contains__(self, name: str) -> bool:
        return name in self._entries or self._derivation(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
