"""Operations on lists of parser events."""

from __future__ import annotations

import itertools

from ..protocols.parsers import Content, ParserEvent, Reasoning, ToolCallArguments


def merge_events(events: list[ParserEvent]) -> list[ParserEvent]:
    """Join adjacent pieces of one text, as streams send a chunk per event."""
    if len(events) < 2:
        return events
    merged: list[ParserEvent] = []
    for (kind, index), group in itertools.groupby(events, _text_key):
        if kind is ToolCallArguments:
            merged.append(ToolCallArguments(index, "".join(e.fragment for e in group)))  # type: ignore[union-attr]
        elif issubclass(kind, Content | Reasoning):
            merged.append(kind("".join(e.text for e in group)))  # type: ignore[union-attr]
        else:
            merged += group
    return merged


def _text_key(event: ParserEvent) -> tuple[type[ParserEvent], int]:
    return type(event), getattr(event, "index", 0)
