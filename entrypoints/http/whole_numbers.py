"""Converts integers that clients wrote as floats: JSON does not distinguish `3.0` from 3."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec.inspect

Read = Callable[[Any], Any]


@functools.cache
def integers_of(kind: Any) -> dict[str, Read]:
    """Return converters of a Struct's integer fields; values that are not whole stay, and are
    refused later.
    """
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return _fields(info)


def with_integers(raw: dict[str, Any], fields: dict[str, Read]) -> dict[str, Any]:
    """Return a request's fields with whole floats as integers where expected."""
    return {name: fields[name](value) if name in fields else value for name, value in raw.items()}


def _fields(struct: msgspec.inspect.StructType) -> dict[str, Read]:
    readers = {field.encode_name: _reader(field.type) for field in struct.fields}
    return {name: read for name, read in readers.items() if read is not None}


def _reader(kind: msgspec.inspect.Type) -> Read | None:
    """Return a type's converter; None without integers, or if floats are allowed."""
    match kind:
        case msgspec.inspect.IntType():
            return _integer
        case msgspec.inspect.UnionType(types=types):
            if any(isinstance(field_type, msgspec.inspect.FloatType) for field_type in types):
                return None
            readers = [read for field_type in types if (read := _reader(field_type)) is not None]
            return functools.partial(_through, readers) if readers else None
        case msgspec.inspect.ListType(item_type=inner):
            item = _reader(inner)
            return None if item is None else functools.partial(_list, item)
        case msgspec.inspect.DictType(value_type=inner):
            item = _reader(inner)
            return None if item is None else functools.partial(_dict, item)
        case msgspec.inspect.StructType():
            fields = _fields(kind)
            return functools.partial(_struct, fields) if fields else None
    return None


def _integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _through(readers: list[Read], value: Any) -> Any:
    for read in readers:
        value = read(value)
    return value


def _list(item: Read, value: Any) -> Any:
    return [item(entry) for entry in value] if isinstance(value, list) else value


def _dict(item: Read, value: Any) -> Any:
    return {k: item(v) for k, v in value.items()} if isinstance(value, dict) else value


def _struct(fields: dict[str, Read], value: Any) -> Any:
    return with_integers(value, fields) if isinstance(value, dict) else value
