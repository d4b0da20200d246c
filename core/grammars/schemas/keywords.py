"""Keywords of JSON Schema: those that contain other schemas, and those that are annotations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

NAMED = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords whose value maps names to schemas."""
DATA = frozenset(("enum", "const", "default", "examples", "required", "type"))
"""Keywords whose value is data, even if it looks like a schema."""
NOTES = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated",
     "readOnly", "writeOnly", "$defs", "definitions")
)  # fmt: skip
"""Keywords that constrain nothing by themselves."""


Place: TypeAlias = "tuple[Place, str | int] | None"
"""Where a schema is nested: in which place, and the key or index there. None: the outermost."""


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and every schema nested in it, in order, but not in data (`enum`, `const`).

    What is changed in one before the next is taken is as if it had been there."""
    return (part for _, part in placed_subschemas(schema))


def placed_subschemas(schema: Any) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield what `subschemas` yields, each with its place."""
    todo: list[tuple[Place, Any]] = [(None, schema)]
    while todo:
        place, part = todo.pop()
        if not isinstance(part, dict):
            continue
        yield place, part
        for key, value in reversed(part.items()):
            inner: Place = (place, key)
            if key in NAMED and isinstance(value, dict):
                todo.extend(((inner, name), named) for name, named in reversed(value.items()))
            elif key not in DATA and isinstance(value, list):
                todo.extend(reversed([((inner, n), each) for n, each in enumerate(value)]))
            elif key not in DATA:
                todo.append((inner, value))


def path_of(place: Place, keyword: str) -> str:
    """Return the path of a keyword of the schema at a place: "properties.a.anyOf[1].pattern"."""
    parts = [f".{keyword}"]
    while place is not None:
        place, key = place
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(parts)).removeprefix(".")
