"""Structural tags as requests write them, read once for every backend."""

from __future__ import annotations

import json
from typing import Any

import msgspec


class Structure(msgspec.Struct, frozen=True):
    """Between `begin` and `end` the text follows `schema`."""

    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class StructuralTag(msgspec.Struct, frozen=True):
    """Free text, until one of `triggers` is written: then one of the structures that begin so."""

    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"
    at_least_one: bool = False
    """The text begins with a structure."""
    stop_after_first: bool = False

    def triggered(self) -> list[tuple[str, Structure]]:
        """Each structure with its trigger. Raises ValueError where there is not exactly one."""
        if not self.structures or not self.triggers or not all(self.triggers):
            raise ValueError("structures and triggers must not be empty")
        found = []
        for structure in self.structures:
            own = [t for t in self.triggers if structure.begin.startswith(t)]
            if len(own) != 1:
                raise ValueError(
                    f"begin {structure.begin!r} must start with exactly one of the triggers"
                )
            found.append((own[0], structure))
        return found


def read(text: str) -> StructuralTag:
    """From JSON. Raises ValueError."""
    raw = json.loads(text)
    if "format" in raw:
        raise ValueError("only the form with structures and triggers is read by this backend")
    try:
        tag = msgspec.convert(raw, StructuralTag)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    tag.triggered()
    return tag
