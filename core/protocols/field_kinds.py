"""What a field of config.json may hold: the kinds that `core` and families declare fields with.

    config_fields = {"num_loops": SIZE, "loop_gate": FLAG.not_null()}

Each kind is checked in the file's own content, before anything is built from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, shown

LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True)
class FieldKind:
    """What values a field of config.json may have. null counts as missing."""

    expected: str
    """What a value must be, for errors: "an integer"."""
    fits: Callable[[Any], bool]
    """Whether a value, which is not null, is of this kind."""
    positive: bool = False
    """A number, or each of a list, is more than 0."""
    least: int | None = None
    """Of a size: an integer of the configuration that is built, also one with a default, is this to
    LARGEST_SIZE. None: it is no size."""
    may_be_null: bool = True
    may_be_missing: bool = True

    def not_null(self) -> FieldKind:
        """Return this kind for a field that a file may lack, but must not set to null."""
        return replace(self, may_be_null=False)

    def required(self) -> FieldKind:
        """Return this kind for a field that each file must have."""
        return replace(self, may_be_null=False, may_be_missing=False)

    def check(
        self, file: Path | str, fields: Mapping[str, Any], name: str, scope: str = ""
    ) -> None:
        """Raise ConfigError, with the file's and the field's name, for a field that is not of this
        kind. `scope`: in front of the name in errors, such as "rope_scaling."."""
        value = fields.get(name)
        if value is None:
            if not (self.may_be_null if name in fields else self.may_be_missing):
                raise wrong_field(file, scope + name, None, self.expected)
            return
        if not self.fits(value):
            raise wrong_field(file, scope + name, value, self.expected)
        if self.positive and min(value if isinstance(value, list) else [value]) <= 0:
            raise wrong_field(file, scope + name, value, "positive")


def wrong_field(file: Path | str, field: str, value: Any, expected: str) -> ConfigError:
    """Return the error for a field's value."""
    return ConfigError(
        f"model: {file}: {field} must be {expected}, got {shown(value)}", param="model"
    )


def declared_fields(owner: object) -> dict[str, FieldKind]:
    """Return the fields that a class and its bases declare (`config_fields`), each as the most
    derived class does. Of a factory function: its attribute's."""
    declared: dict[str, FieldKind] = {}
    for part in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
        declared |= getattr(part, "__dict__", {}).get("config_fields") or {}
    return declared


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    # NaN is none, and infinity no size of anything.
    return type(value) in (int, float) and abs(value) < 1e300


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _either(one: Callable[[Any], bool], other: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: one(value) or other(value)


INTEGER = FieldKind("an integer", _is_int)
"""An integer, not true or false."""
SIZE = replace(INTEGER, least=1)
"""An integer that is 1 to LARGEST_SIZE in the configuration that is built."""
SIZE_OR_ZERO = replace(INTEGER, least=0)
"""SIZE, or 0 for nothing of it."""
COUNT = FieldKind("an integer of at least 1", lambda value: _is_int(value) and value >= 1)
"""An integer from 1 in the file, before a configuration class gets it."""
NUMBER = FieldKind("a number", _is_number)
"""An integer or a float, neither infinite nor NaN."""
POSITIVE = replace(NUMBER, positive=True)
"""A number that is more than 0."""
FLAG = FieldKind("true or false", lambda value: isinstance(value, bool))
"""true or false."""
TEXT = FieldKind("a text", lambda value: isinstance(value, str))
"""A text."""
OBJECT = FieldKind("an object", lambda value: isinstance(value, dict))
"""A JSON object."""
INTEGERS = FieldKind("a list of integers", _list_of(_is_int))
"""A list of integers."""
NUMBERS = FieldKind("a list of numbers", _list_of(_is_number))
"""A list of numbers."""
NUMBERS_OR_NULLS = FieldKind(
    "a list of numbers", _list_of(lambda value: value is None or _is_number(value))
)
"""A list of numbers, some of which may be null."""
TEXTS = FieldKind("a list of texts", _list_of(TEXT.fits))
"""A list of texts."""
INTEGER_OR_INTEGERS = FieldKind(
    "an integer or a list of integers", _either(_is_int, _list_of(_is_int))
)
"""An integer, or a list of them."""
SIZE_OR_SIZES = replace(INTEGER_OR_INTEGERS, least=1)
"""SIZE, or a list of integers."""
POSITIVE_OR_LIST = FieldKind(
    "a number or a list of numbers",
    _either(_is_number, lambda value: bool(value) and _list_of(_is_number)(value)),
    positive=True,
)
"""A number that is more than 0, or a list of such."""
