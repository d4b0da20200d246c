"""The parser kits fail where a parser breaks its contract; one parser for each way to break it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.core.protocols import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from jackfield.plugins.conformance.parsers import ReasoningParserKit, Sample, ToolParserKit

CALL = '<c>{"a": 1}</c>'


class Right:
    """Reads `<c>{…}</c>` as a call of `f`, once the text is over."""

    markers = ("<c>", "</c>")

    def __init__(self, *, tools: Any = ()) -> None:
        self.parts: list[str] = []

    def feed(self, text: str, token_ids: Any = ()) -> list[ParserEvent]:
        self.parts.append(text)
        return []

    def finish(self) -> list[ParserEvent]:
        text = "".join(self.parts)
        head, _, rest = text.partition("<c>")
        source, closed, tail = rest.partition("</c>")
        try:
            value = json.loads(source) if closed else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            return [Content(text)] if text else []
        events: list[ParserEvent] = [Content(head)] if head else []
        events += [ToolCallStart(0, "f"), ToolCallArguments(0, source), ToolCallEnd(0)]
        return [*events, Content(tail)] if tail else events


class LosesPieces(Right):
    def feed(self, text: str, token_ids: Any = ()) -> list[ParserEvent]:
        return super().feed(text if text not in ("<", "") else "")


class Raises(Right):
    def finish(self) -> list[ParserEvent]:
        if "<c>" in "".join(self.parts):
            json.loads("".join(self.parts).partition("<c>")[2].partition("</c>")[0])
        return super().finish()


class EndsWhatIsCutOff(Right):
    def finish(self) -> list[ParserEvent]:
        text = "".join(self.parts)
        if text.startswith("<c>{") and "</c>" not in text:
            return [ToolCallStart(0, "f"), ToolCallArguments(0, text[3:]), ToolCallEnd(0)]
        return super().finish()


class Quadratic(Right):
    def feed(self, text: str, token_ids: Any = ()) -> list[ParserEvent]:
        super().feed(text)
        self.parts = ["".join(self.parts)]
        sum(char == "{" for char in self.parts[0])
        return []


class NumbersFromOne(Right):
    def finish(self) -> list[ParserEvent]:
        return [
            ToolCallStart(1, event.name) if isinstance(event, ToolCallStart) else event
            for event in super().finish()
        ]


class TestRight(ToolParserKit):
    name, parser_class = "right", Right
    samples = [Sample(f"x {CALL}", content="x ", calls=[("f", {"a": 1})])]


def kit_of(parser: type) -> ToolParserKit:
    short = {"hostile": lambda self: iter([("{", 160_000)]), "seconds": 0.2}
    return type("Kit", (TestRight,), {"parser_class": parser, **short})()


BROKEN: dict[str, tuple[type, Callable[[ToolParserKit], object]]] = {
    "a piece is lost": (LosesPieces, lambda kit: kit.test_any_cutting_gives_the_same_fold()),
    "a sample is lost when cut": (
        LosesPieces,
        lambda kit: kit.test_a_sample_cut_anywhere_means_the_same(Sample("<c>")),
    ),
    "garbage raises": (Raises, lambda kit: kit.test_any_cutting_gives_the_same_fold()),
    "a cut call ends": (
        EndsWhatIsCutOff,
        lambda kit: kit.test_a_sample_may_end_anywhere(Sample(CALL)),
    ),
    "pieces take quadratic time": (
        Quadratic,
        lambda kit: kit.test_tiny_pieces_take_linear_time(),
    ),
    "calls are numbered from one": (
        NumbersFromOne,
        lambda kit: kit.test_a_sample_means_what_it_says(kit.samples[0]),
    ),
    "a sample means something else": (
        Right,
        lambda kit: kit.test_a_sample_means_what_it_says(Sample(CALL, calls=[("f", {"a": 2})])),
    ),
    "a complete call was expected to be cut": (
        Right,
        lambda kit: kit.test_a_sample_means_what_it_says(Sample(CALL, calls=[("f", '{"a": 1}')])),
    ),
}


@pytest.mark.parametrize(("parser", "check"), BROKEN.values(), ids=BROKEN)
def test_the_tool_kit_finds(parser: type, check: Callable[[ToolParserKit], object]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(kit_of(parser))


class Thinks:
    """Thought up to `|`."""

    def __init__(self, *, thinking: bool = True) -> None:
        self.reasoning_ended = not thinking

    def feed(self, text: str, token_ids: Any = ()) -> list[ParserEvent]:
        events: list[ParserEvent] = []
        if not self.reasoning_ended:
            thought, mark, text = text.partition("|")
            self.reasoning_ended = bool(mark)
            events += [Reasoning(thought)] if thought else []
        return [*events, Content(text)] if text else events

    def finish(self) -> list[ParserEvent]:
        return []


class EndsLate(Thinks):
    def feed(self, text: str, token_ids: Any = ()) -> list[ParserEvent]:
        events = super().feed(text)
        self.ended = getattr(self, "ended", self.reasoning_ended)
        self.ended, self.late = any(isinstance(e, Content) for e in events) or self.ended, True
        return events

    @property
    def reasoning_ended(self) -> bool:
        return getattr(self, "ended" if hasattr(self, "late") else "now", False)

    @reasoning_ended.setter
    def reasoning_ended(self, value: bool) -> None:
        self.now = value


class ForgetsTheRest(Thinks):
    def feed(self, text: str, token_ids: Any = ()) -> list[ParserEvent]:
        return super().feed(text)[:1]


class TestThinks(ReasoningParserKit):
    name, parser_class, thought_end = "thinks", Thinks, "|"
    samples = [Sample("a|b", content="b", reasoning="a")]


def test_the_reasoning_kit_finds_what_breaks() -> None:
    late = type("Kit", (TestThinks,), {"parser_class": EndsLate})()
    with pytest.raises(AssertionError):
        late.test_thought_ends_where_its_mark_does(late.samples[0])
    forgets = type("Kit", (TestThinks,), {"parser_class": ForgetsTheRest})()
    with pytest.raises(AssertionError):
        forgets.test_any_cutting_gives_the_same_fold()
