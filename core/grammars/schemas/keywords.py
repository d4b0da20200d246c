"""Keywords of JSON Schema: those that contain other schemas, and those that are annotations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and every schema nested in it, but not in data (`enum`, `const`)."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for key, value in part.items():
            if key in NAMED and isinstance(value, dict):
                todo.extend(value.values())
            elif key not in DATA:
                todo.extend(value if isinstance(value, list) else [value])
