"""Chains the incremental parsers of one completion, and folds their events into a message."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import msgspec

from ..errors import RequestFailed
from ..protocols.parsers import (
    CallText,
    Content,
    ParserEvent,
    PlainText,
    Reasoning,
    ReasoningParser,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
)
from ..text.tokenizer import Tokenizer

logger = logging.getLogger("jackfield.plugins")


class ParsedToolCall(msgspec.Struct):
    """One tool call; `arguments` is JSON text, cut off where the output was."""

    name: str
    arguments: str = ""
    id: str = ""
    """The model's own id for it, where its format has one."""


class ParsedMessage(msgspec.Struct):
    """A parsed completion. `content` and `reasoning` are None where there is none."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedToolCall] = []


def fold(events: Iterable[ParserEvent]) -> ParsedMessage:
    """Return the message that a sequence of events describes."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCallStart] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            calls[event.index] = event
            arguments[event.index] = []
        elif isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.fragment)
    return ParsedMessage(
        content="".join(content) or None,
        reasoning="".join(reasoning) or None,
        tool_calls=[
            ParsedToolCall(call.name, "".join(arguments[i]), call.id)
            for i, call in sorted(calls.items())
        ],
    )


def parser_failed(name: str) -> RequestFailed:
    """Return the error for the exception of a parser being handled."""
    logger.exception("%s failed on an output", name)
    return RequestFailed(f"{name} failed on this output")


class OutputParser:
    """Splits off reasoning; the rest of the text goes through the tool parser. Either may be None.

    A parser that raises fails its request alone: RequestFailed, with the parser's name.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        names: tuple[str, str] = ("the reasoning parser", "the tool parser"),
    ) -> None:
        """names: the parsers' names in errors (`Registry.described`)."""
        self._reasoning = reasoning
        self._tools = tools
        self._names = names
        self._reads_plain_text = getattr(tools, "reads_plain_text", False)
        self.num_reasoning_tokens = 0
        """Tokens of reasoning text, where each token's text was fed by itself (`end_token`); those
        of its marks, and of space next to them, do not count."""
        self._in_reasoning = False
        self._token_has_events = False
        self._undecided = 0
        """Tokens without events since the last one of reasoning text: reasoning, if more of it
        follows, else part of its mark."""

    @property
    def plain(self) -> bool:
        """Whether there is no parser, so that all text is content."""
        return self._reasoning is None and self._tools is None

    @property
    def reasoning_ended(self) -> bool:
        """Whether what follows is no longer reasoning."""
        return self._reasoning is None or self._reasoning.reasoning_ended

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Return the events of the next piece of text; token_ids: the tokens that it came from."""
        if self._reasoning is None:
            if self._tools is not None:
                return self._feed_tools(text, token_ids)
            return [Content(text)] if text else []
        try:
            events = self._reasoning.feed(text, token_ids)
        except Exception as error:
            raise self._failed(0) from error
        if events:
            self._token_has_events = True
            self._in_reasoning = isinstance(events[-1], Reasoning)
        return self._through_tools(events)

    def end_token(self) -> None:
        """Count a token as reasoning if it is: its text is what was fed since the last call."""
        has_events, self._token_has_events = self._token_has_events, False
        if self.reasoning_ended:
            return
        if not self._in_reasoning:
            self._undecided = 0
        elif has_events:
            self.num_reasoning_tokens += self._undecided + 1
            self._undecided = 0
        else:
            self._undecided += 1

    def finish(self) -> list[ParserEvent]:
        """End the text; return the events of what was held back."""
        events: list[ParserEvent] = []
        if self._reasoning is not None:
            try:
                last = self._reasoning.finish()
            except Exception as error:
                raise self._failed(0) from error
            events += self._through_tools(last)
        if self._tools is not None:
            try:
                events += self._tools.finish()
            except Exception as error:
                raise self._failed(1) from error
        return events

    def _feed_tools(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        assert self._tools is not None
        try:
            return self._tools.feed(text, token_ids)
        except Exception as error:
            raise self._failed(1) from error

    def _failed(self, which: int) -> RequestFailed:
        return parser_failed(self._names[which])

    def _through_tools(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self._tools is not None and len(events) == 1 and type(events[0]) is Content:
            return self._feed_tools(events[0].text)  # Fast path for most text.
        events_out: list[ParserEvent] = []
        for event in events:
            if not isinstance(event, Content):
                events_out.append(event)
            elif isinstance(event, PlainText) and not self._reads_plain_text:
                events_out.append(Content(event.text))
            elif self._tools is not None:
                events_out += self._feed_tools(event.text)
            elif not isinstance(event, CallText):
                events_out.append(event)
        return events_out


def hides_markers(tokenizer: Tokenizer, parsers: Iterable[type]) -> bool:
    """Return whether a text that these parsers look for is a special token, or one needs them all,
    so that they must be shown.
    """
    parsers = tuple(parsers)
    if any(getattr(parser, "keeps_special_tokens", False) for parser in parsers):
        return True
    special = {tokenizer.added_tokens[id].content for id in tokenizer.special_ids}
    return any(special.intersection(getattr(parser, "markers", ())) for parser in parsers)
