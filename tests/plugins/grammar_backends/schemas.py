"""What a schema says about a value, worked out by hand: a second opinion on every backend."""

from __future__ import annotations

import re
from typing import Any

KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


def wrong(value: Any, schema: Any, root: Any = None, path: str = "$") -> str | None:
    """The first place where `value` is not what `schema` asks for; None: it is."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return None if schema else f"{path}: nothing is allowed"
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target[part] if part else target
        return wrong(value, target, root, path)
    for name in ("anyOf", "oneOf"):
        if name in schema and all(wrong(value, first, root, path) for first in schema[name]):
            return f"{path}: none of {name}"
    if "const" in schema and value != schema["const"]:
        return f"{path}: not the constant"
    if "enum" in schema and value not in schema["enum"]:
        return f"{path}: {value!r} is none of enum"
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_is(value, kind) for kind in types):
            return f"{path}: {value!r} is no {schema['type']}"
    if isinstance(value, str):
        return _text(value, schema, path)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            return f"{path}: {value} is out of range"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{path}: {len(value)} items"
        problems = (
            wrong(first, schema.get("items", True), root, f"{path}[{i}]")
            for i, first in enumerate(value)
        )
        return next((reason for reason in problems if reason), None)
    if isinstance(value, dict):
        return _object(value, schema, root, path)
    return None


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, KINDS[kind])


def _text(value: str, schema: Any, path: str) -> str | None:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return f"{path}: {len(value)} characters"
    if "pattern" in schema and re.search(schema["pattern"], value) is None:
        return f"{path}: {value!r} does not match {schema['pattern']}"
    return None


def _object(value: Any, schema: Any, root: Any, path: str) -> str | None:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"{path}: {name} is missing"
    for name, item in value.items():
        part = properties.get(name, schema.get("additionalProperties", True))
        if (reason := wrong(item, part, root, f"{path}.{name}")) is not None:
            return reason
    return None
