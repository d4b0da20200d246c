"""`ToolParserKit` and `ReasoningParserKit`: whether a parser of model output keeps its contract.

Subclass one in your tests, and say what only you can know:

    class TestMine(ToolParserKit):
        name = "mine"
        samples = [
            Sample('<call>{"name": "f", "arguments": {}}</call>', calls=[("f", {})]),
        ]
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from .clock import growth, processor_seconds
from .kit import Kit


class Sample(msgspec.Struct, frozen=True):
    """One output of the model family, and its meaning."""

    text: str
    """The output as the model wrote it, special tokens included, without the end of the prompt."""
    content: str | None = None
    """The content, without reasoning and calls; None if there is none."""
    calls: Sequence[tuple[str, Any]] = ()
    """(name, arguments): their value for a complete call; a str, for one that is cut off, is the
    JSON text that there is of them."""
    reasoning: str | None = None
    """The reasoning; None if there is none."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The request's tools, in OpenAI's form."""
    thinking: bool = True
    """Whether the template enables reasoning for this request."""
    ids: Sequence[str] | None = None
    """The model's own ids of the calls, where the format has them; None: not compared."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A request's tool in OpenAI's form. A property is a schema, or the name of its type."""
    schemas = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
    parameters = {"type": "object", "properties": schemas}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def run(parser: Any, pieces: Sequence[str]) -> list[ParserEvent]:
    """Return all events of a text that arrives in these pieces."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Split the text at these places."""
    at = sorted({0, len(text), *(place for place in places if 0 < place < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(at)]


LETTERS = 24
"""Letters fed one by one on each side of a place, where every place of a sample is tried."""


def letters(text: str, start: int, stop: int) -> list[str]:
    """Split the text into letters from `start` to `stop`, and one piece before and after them."""
    return cut(text, range(max(start, 0), min(stop, len(text)) + 1))


class ParserKit(Kit):
    """Common parts of the two kits."""

    samples: ClassVar[Sequence[Sample]] = ()
    markers: ClassVar[Sequence[str]] = ()
    """Texts that are marks for the parser, besides its class's `markers`."""
    examples: ClassVar[int] = 60
    """Random texts that each property is tried with."""
    seconds: ClassVar[float] = 3.0
    """Processor seconds per megabyte at most, for text in one piece, on an idle core."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each sample."""
        if "sample" in metafunc.fixturenames:
            ids = [re.sub(r"\s+", " ", sample.text)[:40] for sample in self.samples]
            metafunc.parametrize("sample", self.samples, ids=ids)

    @property
    def parser_class(self) -> Any:
        """The class that is registered under the name."""
        return self.registered()

    def make(self, sample: Sample | None = None) -> Any:
        """Create a parser for the request of a sample."""
        raise NotImplementedError

    def check_events(self, events: Sequence[ParserEvent]) -> None:
        """Raise AssertionError if events break the protocol."""
        raise NotImplementedError

    # ------------------------------------------------------------ texts

    def marks(self) -> list[str]:
        """Return the texts that are marks for the parser."""
        return [*getattr(self.parser_class, "markers", ()), *self.markers]

    def texts(self) -> st.SearchStrategy[str]:
        """Return garbage made of the dialect's markers, words, and beginnings of samples."""
        words = {word for s in self.samples for word in re.findall(r"[^\W_]+|[\W_]", s.text)[:200]}
        marks = self.marks()
        halves = [part for mark in marks for part in (mark[: len(mark) // 2], mark[1:])]
        pieces = [*sorted(words), *marks, *halves, *_PIECES]
        fragment = st.sampled_from(pieces) | st.text(max_size=3)
        if self.samples:
            texts = [sample.text for sample in self.samples]
            ends = st.tuples(st.sampled_from(texts), st.integers(0, max(map(len, texts))))
            fragment |= ends.map(lambda end: end[0][: end[1]])
            if marks:
                joined = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
                parts = {p for text in texts for p in re.split(f"({joined})", text) if p}
                fragment |= st.sampled_from(sorted(parts))
        return st.lists(fragment, max_size=12).map("".join)

    def hostile(self) -> Iterator[tuple[str, int]]:
        """Yield (text, how often it is repeated in a megabyte)."""
        for text in ("{", "[", '{"a":', '[{"', "\n", " "):
            yield text, 1_000_000 // len(text)

    def property(self, check: Callable[..., None], **strategies: Any) -> None:
        """Try `check` with random arguments."""
        limits = settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        limits(given(**strategies)(check))()

    def leads(self) -> Iterator[str]:
        """Yield beginnings of an output, each of which leaves the parser in another state."""
        yield ""
        for sample in self.samples[:3]:
            yield sample.text[: len(sample.text) // 2]

    def check_time(self, text: str, size: int) -> None:
        """Raise AssertionError if a text in pieces of one size takes more than `seconds`."""
        sample = self.samples[0] if self.samples else None
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        seconds = processor_seconds(lambda: run(self.make(sample), pieces), self.seconds)
        assert seconds < self.seconds, f"{len(text)} characters, … {text[-60:]!r}: {seconds:.2f} s"

    # ------------------------------------------------------------ tests

    def test_a_sample_means_what_it_says(self, sample: Sample) -> None:
        """Compare the events with the sample, in one piece and split into characters."""
        for pieces in ([sample.text], list(sample.text)):
            events = run(self.make(sample), pieces)
            self.check_events(events)
            message = fold(events)
            assert message.content == sample.content, message
            assert message.reasoning == sample.reasoning, message
            names = [name for name, _ in sample.calls]
            assert [call.name for call in message.tool_calls] == names, message
            finished = {event.index for event in events if isinstance(event, ToolCallEnd)}
            for index, (call, (_, expected)) in enumerate(
                zip(message.tool_calls, sample.calls, strict=True)
            ):
                if isinstance(expected, str):
                    assert index not in finished, f"call {index} is cut off, and has an end"
                    assert call.arguments == expected, call
                else:
                    assert index in finished, f"call {index} has no end: {call.arguments}"
                    assert strictly(call.arguments) == expected, call
            if sample.ids is not None:
                assert [call.id for call in message.tool_calls] == list(sample.ids), message

    def test_a_sample_cut_anywhere_means_the_same(self, sample: Sample) -> None:
        """Compare all splits into two pieces."""
        whole = fold(run(self.make(sample), [sample.text]))
        for place in range(1, min(len(sample.text), 600)):
            assert fold(run(self.make(sample), cut(sample.text, [place]))) == whole, place

    def test_a_sample_may_end_anywhere(self, sample: Sample) -> None:
        """End the output early, as `max_tokens` does: complete calls keep their end, and nothing
        raises."""
        for end in range(min(len(sample.text), 600)):
            text = sample.text[:end]
            events = run(self.make(sample), [text])
            self.check_events(events)
            by_letter = letters(text, end - LETTERS, end)
            assert fold(run(self.make(sample), by_letter)) == fold(events), repr(text)

    def test_any_cutting_gives_the_same_fold(self) -> None:
        """Split any text anywhere: the fold stays the same, and no text makes the parser raise."""

        def check(text: str, places: list[int], sample: Sample | None) -> None:
            events = run(self.make(sample), [text])
            self.check_events(events)
            whole = fold(events)
            assert fold(run(self.make(sample), cut(text, places))) == whole, repr(text)
            assert fold(run(self.make(sample), ["", *text, ""])) == whole, repr(text)

        places = st.lists(st.integers(0, 400), max_size=8)
        samples = st.sampled_from([None, *self.samples])
        self.property(check, text=self.texts(), places=places, sample=samples)

    def test_no_text_makes_it_raise(self) -> None:
        """Feed arbitrary characters."""

        def check(text: str) -> None:
            self.check_events(run(self.make(), [text]))

        check(string.printable)  # All of ASCII, besides what is drawn.
        self.property(check, text=st.text(max_size=60))

    def test_a_megabyte_takes_linear_time(self) -> None:
        """Feed brackets, the dialect's marks, and calls left open."""
        for text, count in self.hostile():
            self.check_time(text * count, 1 << 20)

    def test_tiny_pieces_take_linear_time(self) -> None:
        """Feed a sixteenth of the same text in pieces of three characters."""
        for text, count in self.hostile():
            self.check_time(text * (count // 16), 3)

    def test_a_piece_costs_the_same_however_much_came_before(self) -> None:
        """Searching all of the text for each piece is quadratic, even if each search is fast."""
        sample = self.samples[0] if self.samples else None
        for lead in self.leads():
            parsers = [self.make(sample), self.make(sample)]
            for parser, count in zip(parsers, (500, EARLIER), strict=True):
                parser.feed(lead)
                parser.feed("ab\n" * (count // 3))
            small, large = (functools.partial(_feed, parser) for parser in parsers)
            ratio = growth(small, large, BAR)
            message = (
                f"after {lead[-60:]!r} and a megabyte of words a piece takes {ratio:.0f} times"
            )
            assert ratio < BAR, f"{message} as long as after 500 letters"


EARLIER = 1_000_000
"""Letters fed before: searching them takes ten times as long as a piece."""
BAR = 5.0
"""Allowed ratio of the time of a piece after them to the time without them."""


def _feed(parser: Any) -> None:
    """Feed many small pieces."""
    for _ in range(100):
        parser.feed("abc")


def check_sendable(text: str) -> None:
    """Raise AssertionError for text with half a pair of surrogates, which UTF-8 does not have."""
    assert not re.search("[\ud800-\udfff]", text), f"{text!r} has no bytes"


def strictly(text: str) -> Any:
    """Decode JSON strictly by RFC 8259. Raises ValueError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


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


_PIECES = [*'{}[]()<>|=:,"\'\\/;', "\n", " ", "é🙂", '"name"', '"arguments"', '"parameters"',
           "true", "None", "-0.5e3", '"\\u00', "\\ud83d", "x" * 70, '{"name": "f", "arguments": {',
           '[{"name": "f", "arguments": {}}]', "</", "```", "json"]  # fmt: skip


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
                    raise AssertionError("a tool parser knows no thought")

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

        self.property(check, text=st.text("aZé🙂 \n.,", max_size=40))


class ReasoningParserKit(ParserKit):
    """Checks a plugin of `register_reasoning_parsers`."""

    kind = "reasoning_parser"
    thought_end: ClassVar[str] = ""
    """The text that ends the reasoning of a sample, if there is any: the reasoning has ended
    exactly when this text has been fed."""

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
        return [*super().marks(), *([self.thought_end] if self.thought_end else [])]

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

    def test_thought_ends_where_its_mark_does(self, sample: Sample) -> None:
        """`reasoning_ended` is true after the mark, so that a grammar may begin."""
        parser = self.make(sample)
        before = bool(parser.reasoning_ended)
        if not sample.thinking:
            assert before, "no thought is to come"
        changed = None
        for place, char in enumerate(sample.text):
            parser.feed(char)
            assert parser.reasoning_ended or not before, "thought that has ended stays ended"
            if parser.reasoning_ended and not before:
                changed, before = place + 1, True
        if self.thought_end and sample.reasoning is not None and sample.thinking:
            at = sample.text.find(self.thought_end)
            if at >= 0:
                assert changed == at + len(self.thought_end)
            elif sample.content is None:
                assert changed is None, "there is no answer yet"

    def test_it_stays_ended_whatever_comes(self) -> None:
        """`reasoning_ended` stays true, also for garbage."""

        def check(text: str) -> None:
            parser = self.make()
            finished = parser.reasoning_ended
            for char in text:
                parser.feed(char)
                assert parser.reasoning_ended or not finished
                finished = parser.reasoning_ended

        self.property(check, text=self.texts())

    def test_words_are_lost_in_neither(self) -> None:
        """Text without marks becomes reasoning or content, unchanged."""

        def check(text: str, thinking: bool) -> None:
            parser = self.parser_class(thinking=thinking)
            message = fold(run(parser, [text]))
            assert (message.reasoning or "") + (message.content or "") in self.unchanged(text), (
                repr(text)
            )

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
