"""What the machines for tool calls share: the events, and what is said between calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from ...core.protocols import (
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
    """Marks between which all is content: thought, where no reasoning parser has taken it out."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self.schemas = schemas(tools)
        self.answer = Answer(self.events)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Events of the next piece of text."""
        return super().feed(text)

    def finish(self) -> list[ParserEvent]:
        """The text is over: what was held back and is no call is content."""
        return [*super().finish(), *self.answer.finish()]

    def known(self, name: str) -> bool:
        """Whether the request has this tool, or does not say which it has."""
        return not self.schemas or name in self.schemas

    def until_call(self, marks: Marks) -> Read[str]:
        """Hand content on up to the first mark outside of opaque text; consume and return that, or
        "" at the end. `marks` has the one that opens opaque text in it.
        """
        while mark := (yield from self.text.until(marks, self.answer.say)):
            if self.opaque is None or mark != self.opaque[0]:
                return mark
            self.answer.say(mark)
            self.answer.say((yield from self.text.until(Marks(self.opaque[1]), self.answer.say)))
        return ""


class Answer:
    """Content and calls, as events."""

    def __init__(self, events: list[ParserEvent]) -> None:
        self._events = events
        self.calls = 0
        """Calls that have started."""
        self._said = False
        """Whether content was passed on."""
        self._spaces: list[str] = []
        """Whitespace that may yet stand between contents."""

    def say(self, text: str) -> None:
        """Pass content on, whitespace next to calls only once it stands between contents."""
        if not text:
            return
        if not self._spaces and text[0] not in SPACE and text[-1] not in SPACE:
            self._events.append(Content(text))  # What most text is: the rest would do the same.
            self._said = True
            return
        bare = text.strip(SPACE)
        if not bare:
            self._spaces.append(text)
            return
        begin = len(text) - len(text.lstrip(SPACE))
        if self._said or not self.calls:
            self._pass_on([*self._spaces, text[: begin + len(bare)]])
        else:
            self._pass_on([bare])
        self._said = True
        after = text[begin + len(bare) :]
        self._spaces = [after] if after else []

    def start(self, name: str, id: str = "") -> None:
        """A call begins."""
        self._events.append(ToolCallStart(self.calls, name, id))
        self.calls += 1

    def arguments(self, fragment: str) -> None:
        """More of the last call's arguments."""
        if fragment:
            self._events.append(ToolCallArguments(self.calls - 1, fragment))

    def end(self) -> None:
        """The last call is complete."""
        self._events.append(ToolCallEnd(self.calls - 1))

    def finish(self) -> list[ParserEvent]:
        """The text is over."""
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

    `gap`, consumed before, and a little junk before the mark are dropped with it.
    """
    gap += yield from text.run(SPACES)
    if close:
        found = yield from text.until_within(close_or_open, MAX_JUNK)
        if found is not None:
            if found[1] in close:
                return
            text.back("".join(found))
    answer.say(gap)


def rest_of_call(text: Cursor, close: Collection[str], close_or_open: Marks) -> Read[None]:
    """Drop what is left of a call that has broken off: up to its closing mark, and that; up to a
    mark that opens another; or all.
    """
    found = yield from text.until(close_or_open, _drop)
    if found and found not in close:
        text.back(found)


def _drop(text: str) -> None:
    """Not to be shown."""


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tool name → JSON schema of its parameters, from tools in OpenAI's form; lenient."""
    found: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters")
    return found
