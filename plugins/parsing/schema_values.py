"""Converts text to JSON by a schema, for formats that write argument values as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .cursor import SPACE, Cursor
from .python_values import python_value

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_DEPTH = 8
"""Depth below which schemas are not inspected."""
_TYPES = {
    **dict.fromkeys(("string", "str", "text"), "string"),
    **dict.fromkeys(("integer", "int", "long"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("object", "dict"), "object"),
    **dict.fromkeys(("array", "list", "tuple"), "array"),
    "null": "null",
}
"""Type names, some nonstandard → JSON schema's."""
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
          dict: "object", list: "array"}  # fmt: skip


def parameter_types(schema: Any, name: str) -> frozenset[str]:
    """Return the JSON types that a tool's schema allows for a parameter; empty if unknown."""
    if not isinstance(schema, Mapping):
        return frozenset()
    properties = schema.get("properties")
    parameter = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(parameter, schema, set(), 0)


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if unknown. root: base of its
    references.
    """
    return _types(schema, root if isinstance(root, Mapping) else {}, set(), 0)


def _types(schema: Any, root: Mapping[str, Any], seen: set[str], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types.update(name for name in declared if isinstance(name, str))
    if types:
        return frozenset(_TYPES[name] for name in types if name in _TYPES)
    if "const" in schema:
        types.add(_NAMES.get(type(schema["const"]), "string"))
    if isinstance(schema.get("enum"), list):
        types.update(_NAMES.get(type(value), "string") for value in schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            for inner in schema[key][:64]:
                types |= _types(inner, root, seen, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        seen.add(reference)
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part, {}) if isinstance(target, Mapping) else {}
        types |= _types(target, root, seen, depth + 1)
    if not types and "properties" in schema:
        types.add("object")
    if not types and "items" in schema:
        types.add("array")
    return frozenset(types)


def json_of(text: str, types: frozenset[str]) -> str:
    """Return text as JSON of one of these types, or of any without types.

    Other text becomes a string: a parser never fails on text.
    """
    bare = text.strip(SPACE)
    if not types or types & {"object", "array"}:
        source = _json_source(bare)
        if source is not None and _fits(source, types):
            return source
        if types and bare[:1] in ("{", "["):
            source = python_value(bare)
            if source is not None and _fits(source, types):
                return source
    if ("null" in types or "string" not in types) and types and bare.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if types & {"integer", "number"}:
        if _INTEGER.fullmatch(bare):
            return str(int(bare))
        if _NUMBER.fullmatch(bare):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _json_source(text: str) -> str | None:
    """Return complete JSON, with raw control characters in strings escaped, or None."""
    cursor = Cursor()
    cursor.add(text + "\n")
    cursor.end()
    parts: list[str] = []
    status = cursor.json(lambda _: None, parts.append)
    try:
        next(status)
    except StopIteration as stop:
        done = stop.value == "done" and cursor.rest().strip(SPACE) == ""
        return "".join(parts) if done else None
    return None


def _fits(source: str, types: frozenset[str]) -> bool:
    first = source[0]
    kind = {"{": {"object"}, "[": {"array"}, '"': {"string"}, "t": {"boolean"}, "f": {"boolean"},
            "n": {"null"}}.get(first, {"integer", "number"})  # fmt: skip
    return not types or bool(types & kind)
