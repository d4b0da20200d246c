"""Arguments as elements named after them, nested for objects and lists."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .block_calls import objects
from .cursor import SPACE
from .schema_values import json_of, types_of

MAX_DEPTH = 128
"""Nesting at which arguments end."""
_ITEM = "item"
_CONTAINERS = frozenset({"array", "object"})
_STRING = frozenset({"string"})


class _Element:
    def __init__(self, name: str, schema: Any) -> None:
        self.name, self.schema = name, schema
        self.text: list[str] = []
        self.children: list[tuple[str, str]] = []

    def value(self, root: Any) -> str:
        """Return the element's JSON, by its schema if that has types."""
        text, types = "".join(self.text), types_of(self.schema, root)
        if self.children:
            return self._container(text.strip(SPACE), types)
        if not text.strip(SPACE) and types & _CONTAINERS and "string" not in types:
            return "[]" if "array" in types else "{}"
        return json_of(text, types or _STRING)

    def _container(self, text: str, types: frozenset[str]) -> str:
        if "array" in types or (not types and all(name == _ITEM for name, _ in self.children)):
            return f"[{', '.join(value for _, value in self.children)}]"
        values = _joined(self.children)
        if text:
            key = "$text"
            while key in values:
                key = f"${key}"
            values[key] = json.dumps(text, ensure_ascii=False)
        return objects(values)


def arguments_of(text: str, prefix: str, schema: Any) -> str:
    """Return a call's arguments as JSON. Tags begin with `prefix`. A wrong element ends the
    arguments; earlier ones count.

    schema: of the tool's parameters, or None.
    """
    tag = re.compile(re.escape(prefix) + r"<(/?)([^<>\s]{1,256})>")
    arguments: list[tuple[str, str]] = []
    open_elements: list[_Element] = []
    position = 0
    for match in tag.finditer(text):
        between = text[position : match.start()]
        position = match.end()
        if open_elements:
            open_elements[-1].text.append(between)
        elif between.strip(SPACE):
            break
        closes, name = bool(match[1]), match[2]
        if not closes:
            if len(open_elements) == MAX_DEPTH:
                break
            outer = open_elements[-1].schema if open_elements else schema
            open_elements.append(_Element(name, _inner(outer, name, schema)))
            continue
        if not open_elements or open_elements[-1].name != name:
            break
        element = open_elements.pop()
        into = open_elements[-1].children if open_elements else arguments
        into.append((name, element.value(schema)))
    return objects(_joined(arguments))


def _joined(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return values by name; repeated names become lists."""
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {
        name: f"[{', '.join(same)}]" if len(same) > 1 else same[0] for name, same in values.items()
    }


def _inner(schema: Any, name: str, root: Any) -> Any:
    if not isinstance(schema, Mapping):
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target if isinstance(target, Mapping) else schema
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    if "items" in schema:
        return schema["items"]
    return schema.get("additionalProperties")
