"""Flags from the annotations of a dataclass, and the dataclass from parsed flags.

A field with a description has a flag; `Flag` sets what its name, type and default do not:

    max_body_bytes: Annotated[int, Meta(ge=1, description="refuse larger requests")] = 32 << 20
    docs: Annotated[bool, Meta(description="serve neither /docs nor ..."), Flag("--disable-docs")]

A field that is a dataclass brings its own flags. One that may be None is None unless the flag of
its first field is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .values import Words, seconds, whole_number

T = TypeVar("T")
NO_DEFAULT: Any = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Flag:
    """Differences of a field's flag from the default."""

    name: str | None = None
    """None: the field's name with dashes."""
    aliases: tuple[str, ...] = ()
    group: str = "HTTP"
    metavar: str | None = None
    turns_off: bool = False
    """Whether a bool that defaults to True has one flag for False, instead of --x and --no-x."""
    paired: bool = False
    """Whether a bool that defaults to False also has --x and --no-x."""
    repeated: bool = False
    """Whether each value of a tuple has its own flag, instead of several words."""
    parse: Callable[[str], Any] | None = None
    """Parses a value, or a tuple's item. Raises ArgumentTypeError."""


class FlagField(typing.NamedTuple):
    name: str
    kind: Any
    """Type without None and annotations."""
    optional: bool
    default: Any
    meta: msgspec.Meta
    """The description; without one, the field has no flag."""
    flag: Flag

    @property
    def option(self) -> str:
        return self.flag.name or f"--{self.name.replace('_', '-')}"

    @property
    def dest(self) -> str:
        """Attribute in the parsed namespace."""
        return self.option.removeprefix("--").replace("-", "_")


def fields_of(kind: type[Any]) -> Iterator[FlagField]:
    """Yield a dataclass's fields in order, not descending into dataclasses."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        base, meta, flag = hints[field.name], msgspec.Meta(), Flag()
        if typing.get_origin(base) is typing.Annotated:
            base, *extras = typing.get_args(base)
            meta = next((extra for extra in extras if isinstance(extra, msgspec.Meta)), meta)
            flag = next((extra for extra in extras if isinstance(extra, Flag)), flag)
        optional = typing.get_origin(base) in (types.UnionType, typing.Union)
        if optional:
            (base,) = (part for part in typing.get_args(base) if part is not type(None))
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield FlagField(field.name, base, optional, default, meta, flag)


def add_flags(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Add a dataclass's flags to their groups, creating these."""
    for field in fields_of(kind):
        if dataclasses.is_dataclass(field.kind):
            add_flags(parser, typing.cast(type[Any], field.kind))
        elif field.meta.description:
            _add_flag(_group(parser, field.flag.group), field)


def from_flags(kind: type[T], args: argparse.Namespace) -> T:
    """Return the dataclass for parsed flags; other fields keep their defaults."""
    values: dict[str, Any] = {}
    for field in fields_of(kind):
        if dataclasses.is_dataclass(field.kind):
            inner = typing.cast(type[Any], field.kind)
            first = next(fields_of(inner))
            is_set = not field.optional or getattr(args, first.dest) is not None
            values[field.name] = from_flags(inner, args) if is_set else None
        elif field.meta.description:
            value = getattr(args, field.dest)
            if field.flag.turns_off:
                value = not value
            elif isinstance(value, list):
                value = tuple(value)
            values[field.name] = value
    return kind(**values)


def _group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    groups = (group for group in parser._action_groups if group.title == title)
    return next(groups, None) or parser.add_argument_group(title)


def _add_flag(group: argparse._ArgumentGroup, field: FlagField) -> None:
    flag, kind = field.flag, field.kind
    default = None if field.default is NO_DEFAULT else field.default
    options: dict[str, Any] = {"dest": field.dest, "default": default}
    if kind is bool:
        if flag.turns_off or not (default or flag.paired):
            options |= {"action": "store_true", "default": False}
        else:
            options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(kind) is typing.Literal:
        options["choices"] = typing.get_args(kind)
    elif typing.get_origin(kind) is tuple:
        item = flag.parse or typing.get_args(kind)[0]
        if flag.repeated:
            options |= {"action": "append", "type": item, "default": []}
        else:
            options |= {"action": Words, "nargs": "+", "type": item}
    else:
        options["type"] = flag.parse or _reader(kind, field.meta)
    if flag.metavar is not None:
        options["metavar"] = flag.metavar
    elif kind is int:
        options["metavar"] = "N"
    text = field.meta.description or ""
    paired = options.get("action") is argparse.BooleanOptionalAction
    has_default = paired if kind is bool else default not in (None, "", ())
    if has_default and "default:" not in text:
        shown = ("on" if default else "off") if kind is bool else default
        text += f" (default: {shown:g})" if kind is float else f" (default: {shown})"
    action = group.add_argument(field.option, *flag.aliases, **options)
    action.help = text.replace("%", "%%")  # Set here: argparse adds a pair's default itself.


def _reader(kind: Any, meta: msgspec.Meta) -> Callable[[str], Any]:
    if kind is int:
        return functools.partial(whole_number, least=meta.ge, most=meta.le)
    if kind is float:
        return seconds
    assert kind in (str, Path), kind
    return typing.cast(Callable[[str], Any], kind)
