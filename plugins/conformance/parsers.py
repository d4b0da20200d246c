"""`ToolParserKit` and `ReasoningParserKit`: whether a parser of model output keeps its contract.

Subclass one in your tests, and say what only you can know:

    class TestMine(ToolParserKit):
        name = "mine"
        samples = [
            Sample('<call>{"name": "f", "arguments": {}}</call>', calls=[("f", {})]),
        ]
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from ...core.old_names import warn
from ...core.output_parsing.output_parser import OutputParser, ParsedMessage, fold
from ...core.protocols.parsers import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from .call_forms import CallFormChecks
from .parser_checks import (
    LETTERS,
    ParserKit,
    Sample,
    check_sendable,
    cut,
    letters,
    run,
    strictly,
    tool,
)

_SCALAR = re.compile(r'(?<=[:\[,>=\n])( ?)(-?\d[\w.+-]*|true|false|null|"[^"\n]*")')
_WRONG_VALUES = ("NaN", "-Infinity", "Infinity", "01", ".5", "0x1F", "+1", "1_0", "'a'")


def spoiled(text: str) -> Iterator[str]:
    """Yield variants of an output that are not JSON: control characters and half a pair of
    surrogates in strings, odd numbers."""
    quotes = [place + 1 for place, char in enumerate(text) if char == '"'][:40]
    for place in quotes:
        for raw in ("\n", "\x01", "\t", "\\ud83d"):
            yield text[:place] + raw + text[place:]
    for match in itertools.islice(_SCALAR.finditer(text), 12):
        for value in _WRONG_VALUES:
            yield text[: match.start(2)] + value + text[match.end(2) :]


class ToolParserKit(ParserKit, CallFormChecks):
    """Checks a plugin of `register_tool_parsers`."""

    kind = "tool_parser"

    def make(self, sample: Sample | None = None) -> Any:
        """Create a parser for the request of a sample."""
        return self.parser_class(tools=() if sample is None else sample.tools)

    def check_events(self, events: Sequence[ParserEvent]) -> None:
        """Check that calls are numbered from 0, one after another, and that one that ends has valid
        JSON."""
        count, arguments, inside = 0, "", False
        for event in events:
            match event:
                case Content(text):
                    assert text, "an event without text"
                case ToolCallStart(index, name):
                    assert index == count, "calls are numbered in order, from 0"
                    assert name, "a call without a name"
                    check_sendable(name + event.id)
                    count, arguments, inside = count + 1, "", True
                case ToolCallArguments(index, fragment):
                    assert inside and index == count - 1, "arguments of no open call"
                    assert fragment, "an event without text"
                    check_sendable(fragment)
                    arguments += fragment
                case ToolCallEnd(index):
                    assert inside and index == count - 1, "the end of no open call"
                    inside = False
                    assert isinstance(strictly(arguments), dict), arguments
                case Reasoning():
                    raise AssertionError("a tool parser knows no reasoning")

    def opening(self) -> str:
        """Return the beginning of a sample's call, up to its arguments; "" without samples."""
        for sample in self.samples:
            if any(not isinstance(arguments, str) and arguments for _, arguments in sample.calls):
                parser = self.make(sample)
                for place, char in enumerate(sample.text):
                    if any(isinstance(e, ToolCallArguments) for e in parser.feed(char)):
                        return sample.text[: place + 1]
        return ""

    def hostile(self) -> Iterator[tuple[str, int]]:
        """Yield (text, how often it is repeated in a megabyte)."""
        yield from super().hostile()
        size = 1_000_000 // 4
        marks = self.marks()
        for text in (*marks, *(mark[:-1] for mark in marks[:4]), "".join(marks)):
            if text:
                yield text, size // len(text)
        opening = self.opening()
        if opening:
            yield opening, size // len(opening)
            for lead in ("", '"a": '):  # Places of a value, in Python and in JSON.
                yield opening + lead + "[" * 1_000_000, 1
                for text in ('{"a":', '"' + "\\\\" * 50_000, "x" * 100_000, '"a": '):
                    yield opening + lead + text * (size // len(text)), 1
        for sample in self.samples[:1]:
            yield sample.text, size // len(sample.text)

    def leads(self) -> Iterator[str]:
        """Yield also beginnings that end inside a call's arguments, and in a string inside them."""
        yield from super().leads()
        if opening := self.opening():
            yield from (opening, opening + '"a": "')

    def test_arguments_are_strict_json(self, sample: Sample) -> None:
        """A call that ends has valid JSON, whatever the model wrote instead: raw control
        characters, NaN, numbers as other languages have them."""
        if not sample.calls:
            pytest.skip("a sample without calls")
        for text in spoiled(sample.text):
            events = run(self.make(sample), [text])
            try:
                self.check_events(events)
            except ValueError as error:
                pytest.fail(f"{text!r} ends a call whose arguments are no JSON: {error}")
            pairs = enumerate(zip(text, sample.text, strict=False))
            place = next((at for at, (new, old) in pairs if new != old), len(sample.text))
            by_letter = letters(text, place - LETTERS, place + LETTERS)
            assert fold(run(self.make(sample), by_letter)) == fold(events), repr(text)

    def test_text_without_marks_is_passed_on_as_it_is(self) -> None:
        """Letters, spaces and newlines are not marks of a tool parser."""

        def check(text: str) -> None:
            assert fold(run(self.make(), [text])).content == (text or None), repr(text)

        for text in ("a", " ", "\n", ".", " a ", "a  b", "a\n\nb\n", "🙂 é.", "Zaé.,\n " * 9):
            check(text)
        for half in self.half_marks():  # An output may end in one.
            check(f"a{half}")
        self.property(check, text=st.text("aZé🙂 \n.,", max_size=40))


class ReasoningParserKit(ParserKit):
    """Checks a plugin of `register_reasoning_parsers`."""

    kind = "reasoning_parser"
    reasoning_end: ClassVar[str] = ""
    """The text that ends the reasoning of a sample, if there is any: the reasoning has ended
    exactly when this text has been fed."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "thought_end" in vars(cls):
            warn(f"{cls.__qualname__}.thought_end", "reasoning_end", stacklevel=3)
            cls.reasoning_end = vars(cls)["thought_end"]

    def make(self, sample: Sample | None = None) -> Any:
        """Create a parser for the request of a sample."""
        return self.parser_class(thinking=True if sample is None else sample.thinking)

    def check_events(self, events: Sequence[ParserEvent]) -> None:
        """Check that events are content and reasoning, and never empty."""
        for event in events:
            assert isinstance(event, Content | Reasoning), f"{event}: a tool parser's"
            assert event.text, "an event without text"

    def marks(self) -> list[str]:
        """Return the texts that are marks for the parser."""
        return [*super().marks(), *([self.reasoning_end] if self.reasoning_end else [])]

    def hostile(self) -> Iterator[tuple[str, int]]:
        """Yield (text, how often it is repeated in a megabyte)."""
        yield from super().hostile()
        size = 1_000_000 // 4
        marks = self.marks()
        for text in (*marks, *(mark[:-1] for mark in marks), "".join(marks)):
            if text:
                yield text, size // len(text)
        for sample in self.samples[:1]:
            yield sample.text, size // len(sample.text)
            yield sample.text[: len(sample.text) // 2] + "\n" * size, 1

    def test_reasoning_ends_where_its_mark_does(self, sample: Sample) -> None:
        """`reasoning_ended` is true after the mark, so that a grammar may begin."""
        parser = self.make(sample)
        before = bool(parser.reasoning_ended)
        if not sample.thinking:
            assert before, "no reasoning is to come"
        changed = None
        for place, char in enumerate(sample.text):
            parser.feed(char)
            assert parser.reasoning_ended or not before, "reasoning that has ended stays ended"
            if parser.reasoning_ended and not before:
                changed, before = place + 1, True
        if self.reasoning_end and sample.reasoning is not None and sample.thinking:
            at = sample.text.find(self.reasoning_end)
            if at >= 0:
                assert changed == at + len(self.reasoning_end)
            elif sample.content is None:
                assert changed is None, "there is no answer yet"

    def test_it_stays_ended_whatever_comes(self) -> None:
        """`reasoning_ended` stays true, also for garbage."""
        samples = [sample.text for sample in self.samples]

        def check(text: str) -> None:
            parser = self.make()
            finished = parser.reasoning_ended
            for char in text:
                parser.feed(char)
                assert parser.reasoning_ended or not finished
                finished = parser.reasoning_ended
            parser.finish()
            assert parser.reasoning_ended or not finished, repr(text)

        for text in (*self.sequences(), *(a + b for a in samples for b in ("", *samples))):
            check(text)
        self.property(check, text=self.texts())

    def test_words_are_lost_in_neither(self) -> None:
        """Text without marks becomes reasoning or content, unchanged."""

        def check(text: str, thinking: bool) -> None:
            parser = self.parser_class(thinking=thinking)
            message = fold(run(parser, [text]))
            assert (message.reasoning or "") + (message.content or "") in self.unchanged(text), (
                repr(text)
            )

        whole = ("a", ".", "a.b,", "🙂é", "Zaé.," * 9)
        # An output may end in half a mark.
        halves = [before + half for half in self.half_marks() for before in ("a", "")]
        for text, thinking in itertools.product((*whole, *halves), (True, False)):
            check(text, thinking)
        self.property(check, text=st.text("aZé🙂.,", max_size=40), thinking=st.booleans())

    def unchanged(self, text: str) -> tuple[str, ...]:
        """Return the texts that text without marks may become."""
        return (text,)

    def test_a_tool_parser_sees_the_answer_alone(self, sample: Sample) -> None:
        """The chain does not pass reasoning to the tool parser."""
        tools = self.plugins()["tool_parser"].load("hermes")()
        chain = OutputParser(self.make(sample), tools)
        message: ParsedMessage = fold(run(chain, list(sample.text)))
        assert message.reasoning == sample.reasoning


__all__ = [
    "ParserKit",
    "ReasoningParserKit",
    "Sample",
    "ToolParserKit",
    "cut",
    "run",
    "spoiled",
    "strictly",
    "tool",
]
