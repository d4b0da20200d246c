"""From text to messages: reasoning and tool parsers in a row, and the fold of their events.

A streamed answer is the events; a whole answer is their fold. So the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..protocols import (
    Content,
    ParserEvent,
    Reasoning,
    ReasoningParser,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
)


class ParsedToolCall(msgspec.Struct):
    """A call: its name, and its arguments as JSON text."""

    name: str
    arguments: str = ""


class ParsedMessage(msgspec.Struct):
    """What an output says."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedToolCall] = []


class OutputParser:
    """Parses one completion: thought first, then tool calls in what is left."""

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """→ what this piece of text adds."""
        if not text:
            return []
        if self._reasoning is None:
            return self._through_tools([Content(text)])
        return self._through_tools(self._reasoning.feed(text, token_ids))

    def finish(self) -> list[ParserEvent]:
        """→ what was held back."""
        events: list[ParserEvent] = []
        if self._reasoning is not None:
            events += self._through_tools(self._reasoning.finish())
        if self._tools is not None:
            events += self._tools.finish()
        return events

    def _through_tools(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self._tools is None:
            return events
        made: list[ParserEvent] = []
        for event in events:
            if isinstance(event, Content):
                made += self._tools.feed(event.text)
            else:
                made.append(event)
        return made


def fold(events: Iterable[ParserEvent]) -> ParsedMessage:
    """All events of an output as one message."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[str, list[str]]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(index, name):
                calls[index] = (name, [])
            case ToolCallArguments(index, fragment):
                calls[index][1].append(fragment)
    return ParsedMessage(
        content="".join(content) or None,
        reasoning="".join(reasoning) or None,
        tool_calls=[ParsedToolCall(name, "".join(parts)) for name, parts in calls.values()],
    )
