"""Keywords of JSON Schema: those that contain other schemas, and those that are annotations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

NAMED = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords that map names to schemas."""
DATA = frozenset(("enum", "const", "default", "examples", "required", "type"))
"""Keywords whose values are data."""
NOTES = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated",
     "readOnly", "writeOnly", "$defs", "definitions")
)  # fmt: skip
"""Keywords without constraints."""


Place: TypeAlias = "tuple[Place, str | int] | None"
"""Outer place, and key or index; None: outermost."""


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and nested ones in order, except in data (`enum`, `const`).

    Changes made before the next step are followed.
    """
    return (part for _, part in placed_subschemas(schema))


def placed_subschemas(schema: Any) -> Iterator[tuple[Place, dict[str, Any]]]:
    """As `subschemas`, with places."""
    pending: list[tuple[Place, Any]] = [(None, schema)]
    while pending:
        place, part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield place, part
        for key, value in reversed(part.items()):
            inner: Place = (place, key)
            if key in NAMED and isinstance(value, dict):
                pending.extend(((inner, name), named) for name, named in reversed(value.items()))
            elif key not in DATA and isinstance(value, list):
                pending.extend(reversed([((inner, n), each) for n, each in enumerate(value)]))
            elif key not in DATA:
                pending.append((inner, value))


def path_of(place: Place, keyword: str) -> str:
    """Return a keyword's path: "properties.a.anyOf[1].pattern"."""
    parts = [f".{keyword}"]
    while place is not None:
        place, key = place
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(parts)).removeprefix(".")
