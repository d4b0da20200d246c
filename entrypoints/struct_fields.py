"""Fields of a `msgspec.Struct` as text, for documentation and listings."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec


def type_text(hint: Any) -> str:
    """Return a readable type: `int ≥ 1 or None`."""
    if typing.get_origin(hint) is typing.Annotated:
        base, *metas = typing.get_args(hint)
        bounds = ", ".join(bound for meta in metas for bound in _bounds(meta))
        return f"{type_text(base)} {bounds}".strip()
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(type_text(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f'"{value}"' for value in typing.get_args(hint))
    if hint is type(None):
        return "None"
    if typing.get_origin(hint) is not None:
        inner = ", ".join("…" if a is ... else type_text(a) for a in typing.get_args(hint))
        return f"{typing.get_origin(hint).__name__}[{inner}]"
    return getattr(hint, "__name__", str(hint))


def _bounds(meta: Any) -> Iterator[str]:
    if not isinstance(meta, msgspec.Meta):
        return
    for sign, value in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt)):
        if value is not None:
            yield f"{sign} {value}"


def described(hint: Any) -> str:
    metas = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    return next((m.description for m in metas if getattr(m, "description", None)), "")


class FieldText(msgspec.Struct, frozen=True):
    name: str
    type: str
    default: str
    meaning: str
    """Its `Meta` description, or ""."""


def fields_of(schema: type[msgspec.Struct]) -> list[FieldText]:
    """Return the fields of a Struct with defaults."""
    hints = typing.get_type_hints(schema, include_extras=True)
    fields = []
    for field in msgspec.structs.fields(schema):
        hint = hints[field.name]
        value = (
            field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        )
        fields.append(FieldText(field.encode_name, type_text(hint), repr(value), described(hint)))
    return fields
