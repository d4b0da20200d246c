"""Common parts of all tool parsers: the events, and the content between calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from ...core.old_names import RenamedMethod
from ...core.protocols.parsers import (
    Content,
    ParserEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from .cursor import MAX_JUNK, SPACE, SPACES, Cursor, Marks, Read, StreamingParser


class ToolMachine(StreamingParser):
    """A subclass reads its format in `read`; all of them keep these rules:

    - A call starts when its name is known and its arguments have begun, or where they are due and
      something else stands. Arguments are handed on as they arrive.
    - A call that goes wrong before it starts is content, marks included. One that goes wrong after
      has no end: its arguments are what came before the slip. What is left of it, up to its closing
      mark or one that opens another call, is dropped with the marks; in a dialect without closing
      marks it is content. One that the end of the text cuts off has no end either. So a call that
      ends has valid JSON for arguments, and one that does not, the beginning of it.
    - Whitespace next to calls is content only where it stands between two other contents.
    - What stands between the marks `opaque` is content, and has no calls in it.
    """

    opaque: ClassVar[tuple[str, str] | None] = None
    """Marks between which all text is content: reasoning that no reasoning parser has removed."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self.schemas = schemas(tools)
        self.answer = Answer(self.events)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Return the events of the next piece of text."""
        return super().feed(text)

    def finish(self) -> list[ParserEvent]:
        """End the text: what was held back and is not a call is content."""
        return [*super().finish(), *self.answer.finish()]

    def known(self, name: str) -> bool:
        """Return whether the request has this tool, or does not say which tools it has."""
        return not self.schemas or name in self.schemas

    def until_call(self, marks: Marks) -> Read[str]:
        """Hand content on up to the first mark outside of opaque text; consume and return that, or
        "" at the end. `marks` has the one that opens opaque text in it.
        """
        while mark := (yield from self.text.until(marks, self.answer.emit)):
            if self.opaque is None or mark != self.opaque[0]:
                return mark
            self.answer.emit(mark)
            self.answer.emit((yield from self.text.until(Marks(self.opaque[1]), self.answer.emit)))
        return ""


class Answer:
    def __init__(self, events: list[ParserEvent]) -> None:
        self._events = events
        self.calls = 0
        """Calls started."""
        self._has_content = False
        self._spaces: list[str] = []
        """Whitespace that may separate contents."""

    say = RenamedMethod("emit")

    def emit(self, text: str) -> None:
        """Pass on content; whitespace next to calls only if more content follows."""
        if not text:
            return
        if not self._spaces and text[0] not in SPACE and text[-1] not in SPACE:
            self._events.append(Content(text))  # Fast path for most text.
            self._has_content = True
            return
        bare = text.strip(SPACE)
        if not bare:
            self._spaces.append(text)
            return
        begin = len(text) - len(text.lstrip(SPACE))
        if self._has_content or not self.calls:
            self._pass_on([*self._spaces, text[: begin + len(bare)]])
        else:
            self._pass_on([bare])
        self._has_content = True
        after = text[begin + len(bare) :]
        self._spaces = [after] if after else []

    def start(self, name: str, id: str = "") -> None:
        self._events.append(ToolCallStart(self.calls, name, id))
        self.calls += 1

    def arguments(self, fragment: str) -> None:
        if fragment:
            self._events.append(ToolCallArguments(self.calls - 1, fragment))

    def end(self) -> None:
        self._events.append(ToolCallEnd(self.calls - 1))

    def finish(self) -> list[ParserEvent]:
        if not self.calls:
            self._pass_on(self._spaces)
        self._spaces = []
        events = self._events[:]
        self._events.clear()
        return events

    def _pass_on(self, parts: Sequence[str]) -> None:
        text = "".join(parts)
        if text:
            self._events.append(Content(text))


def closing(
    text: Cursor, answer: Answer, close: Collection[str], close_or_open: Marks, gap: str = ""
) -> Read[None]:
    """Consume the mark that closes a call, if it comes before a mark that opens another.

    The consumed `gap`, and a little junk before the mark, are dropped with it.
    """
    gap += yield from text.run(SPACES)
    if close:
        match = yield from text.until_within(close_or_open, MAX_JUNK)
        if match is not None:
            if match[1] in close:
                return
            text.back("".join(match))
    answer.emit(gap)


def rest_of_call(text: Cursor, close: Collection[str], close_or_open: Marks) -> Read[None]:
    """Drop the rest of a broken call: through its closing mark, or up to another's opening mark, or
    everything.
    """
    mark = yield from text.until(close_or_open, _drop)
    if mark and mark not in close:
        text.back(mark)


def _drop(text: str) -> None:
    """Drop the text."""


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schemas of the tools' parameters by name; lenient."""
    by_name: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            by_name[function["name"]] = function.get("parameters")
    return by_name
