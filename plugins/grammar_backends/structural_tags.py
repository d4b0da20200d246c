"""Reads structural tags of requests, in either form, for every backend."""

from __future__ import annotations

import json
from typing import Any

import msgspec


class Structure(msgspec.Struct, frozen=True):
    """A text that follows `schema` between `begin` and `end`."""

    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class StructuralTag(msgspec.Struct, frozen=True):
    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"
    at_least_one: bool = False
    stop_after_first: bool = False

    def format(self) -> dict[str, Any]:
        """Return the tag in the newer form."""
        return {
            "type": "triggered_tags",
            "triggers": self.triggers,
            "tags": [
                {
                    "type": "tag",
                    "begin": structure.begin,
                    "content": {"type": "json_schema", "json_schema": structure.schema},
                    "end": structure.end,
                }
                for structure in self.structures
            ],
            "at_least_one": self.at_least_one,
            "stop_after_first": self.stop_after_first,
        }


def read(text: str) -> dict[str, Any]:
    raw = json.loads(text)
    if "format" in raw:
        if not isinstance(raw["format"], dict):
            raise ValueError("format: must be an object")
        return dict(raw["format"])
    try:
        tag = msgspec.convert(raw, StructuralTag)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if not tag.structures or not tag.triggers or not all(tag.triggers):
        raise ValueError("structures and triggers must not be empty")
    for structure in tag.structures:
        if sum(map(structure.begin.startswith, tag.triggers)) != 1:
            raise ValueError(
                f"begin {structure.begin!r} must start with exactly one of the triggers"
            )
    return tag.format()
