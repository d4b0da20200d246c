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

from ...core.protocols import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from ...core.text.parsing import OutputParser, ParsedMessage, fold
from .call_forms import CallFormChecks
from .clock import growth, processor_seconds
from .kit import Kit


class Sample(msgspec.Struct, frozen=True):
    """One output of the model family, and what it means."""

    text: str
    """As the model wrote it, special tokens included, less what the prompt ends with."""
    content: str | None = None
    """The answer without thought and calls; None if nothing is left of it."""
    calls: Sequence[tuple[str, Any]] = ()
    """(name, arguments): their value for a complete call; a str, for one that is cut off, is the
    JSON text that there is of them."""
    reasoning: str | None = None
    """The thought; None if there is none."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The request's tools, in OpenAI's form."""
    thinking: bool = True
    """Whether the template lets this request think."""
    ids: Sequence[str] | None = None
    """The model's own ids of the calls, where the format has them; None: not compared."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A request's tool in OpenAI's form. A property is a schema, or the name of its type."""
    schemas = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
    parameters = {"type": "object", "properties": schemas}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def run(parser: Any, pieces: Sequence[str]) -> list[ParserEvent]:
    """All events of a text that comes in these pieces."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text, cut at these places."""
    at = sorted({0, len(text), *(place for place in places if 0 < place < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(at)]


class ParserKit(Kit):
    """What the two kits share."""

    samples: ClassVar[Sequence[Sample]] = ()
    markers: ClassVar[Sequence[str]] = ()
    """Texts that mean something to the parser, besides its class's `markers`."""
    examples: ClassVar[int] = 60
    """Random texts a property is tried with."""
    seconds: ClassVar[float] = 1.0
    """Processor time that a megabyte may take in one piece, on an idle core."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each sample."""
        if "sample" in metafunc.fixturenames:
            ids = [re.sub(r"\s+", " ", sample.text)[:40] for sample in self.samples]
            metafunc.parametrize("sample", self.samples, ids=ids)

    @property
    def parser_class(self) -> Any:
        """What is registered under the name."""
        return self.registered()

    def make(self, sample: Sample | None = None) -> Any:
        """A parser for the request that a sample belongs to."""
        raise NotImplementedError

    def check_events(self, events: Sequence[ParserEvent]) -> None:
        """Raises AssertionError where events break the protocol."""
        raise NotImplementedError

    # ------------------------------------------------------------ texts

    def marks(self) -> list[str]:
        """Texts that mean something to the parser."""
        return [*getattr(self.parser_class, "markers", ()), *self.markers]

    def texts(self) -> st.SearchStrategy[str]:
        """Garbage made of the dialect's own markers, words, and beginnings of samples."""
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
        """(text, how often it is repeated in a megabyte)"""
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
        """Beginnings of an output, each of which leaves the parser in another state."""
        yield ""
        for sample in self.samples[:3]:
            yield sample.text[: len(sample.text) // 2]

    def check_time(self, text: str, size: int) -> None:
        """Raises AssertionError where a text in pieces of one size takes more than `seconds`."""
        sample = self.samples[0] if self.samples else None
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        taken = processor_seconds(lambda: run(self.make(sample), pieces), self.seconds)
        assert taken < self.seconds, f"{len(text)} characters, … {text[-60:]!r}: {taken:.2f} s"

    # ------------------------------------------------------------ tests

    def test_a_sample_means_what_it_says(self, sample: Sample) -> None:
        """In one piece, and cut into characters."""
        for pieces in ([sample.text], list(sample.text)):
            events = run(self.make(sample), pieces)
            self.check_events(events)
            found = fold(events)
            assert found.content == sample.content, found
            assert found.reasoning == sample.reasoning, found
            names = [name for name, _ in sample.calls]
            assert [call.name for call in found.tool_calls] == names, found
            ended = {event.index for event in events if isinstance(event, ToolCallEnd)}
            for index, (call, (_, wanted)) in enumerate(
                zip(found.tool_calls, sample.calls, strict=True)
            ):
                if isinstance(wanted, str):
                    assert index not in ended, f"call {index} is cut off, and has an end"
                    assert call.arguments == wanted, call
                else:
                    assert index in ended, f"call {index} has no end: {call.arguments}"
                    assert strictly(call.arguments) == wanted, call
            if sample.ids is not None:
                assert [call.id for call in found.tool_calls] == list(sample.ids), found

    def test_a_sample_cut_anywhere_means_the_same(self, sample: Sample) -> None:
        """In two pieces, at every place."""
        whole = fold(run(self.make(sample), [sample.text]))
        for place in range(1, min(len(sample.text), 600)):
            assert fold(run(self.make(sample), cut(sample.text, [place]))) == whole, place

    def test_a_sample_may_end_anywhere(self, sample: Sample) -> None:
        """As `max_tokens` ends it: calls that are complete keep their end, and nothing breaks."""
        for end in range(min(len(sample.text), 600)):
            text = sample.text[:end]
            events = run(self.make(sample), [text])
            self.check_events(events)
            assert fold(run(self.make(sample), list(text))) == fold(events), repr(text)

    def test_any_cutting_gives_the_same_fold(self) -> None:
        """Whatever the text is; and no text makes it raise."""

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
        """Arbitrary characters."""

        def check(text: str) -> None:
            self.check_events(run(self.make(), [text]))

        check(string.printable)  # All of ASCII, whatever is drawn.
        self.property(check, text=st.text(max_size=60))

    def test_a_megabyte_takes_linear_time(self) -> None:
        """Of brackets, of the dialect's own marks, and of calls left open."""
        for text, count in self.hostile():
            self.check_time(text * count, 1 << 20)

    def test_tiny_pieces_take_linear_time(self) -> None:
        """The same, a sixteenth of it, in pieces of three characters."""
        for text, count in self.hostile():
            self.check_time(text * (count // 16), 3)

    def test_a_piece_costs_the_same_however_much_came_before(self) -> None:
        """Looking through all of the text for each piece is quadratic, however cheap the look."""
        sample = self.samples[0] if self.samples else None
        for lead in self.leads():
            parsers = [self.make(sample), self.make(sample)]
            for parser, count in zip(parsers, (500, EARLIER), strict=True):
                parser.feed(lead)
                parser.feed("ab\n" * (count // 3))
            small, large = (functools.partial(_feed, parser) for parser in parsers)
            ratio = growth(small, large, BAR)
            told = f"after {lead[-60:]!r} and a megabyte of words a piece takes {ratio:.0f} times"
            assert ratio < BAR, f"{told} as long as after 500 letters"


EARLIER = 1_000_000
"""Letters that came before: searching them takes ten times as long as a piece does."""
BAR = 5.0
"""How many times as long a piece may take after them."""


def _feed(parser: Any) -> None:
    """Many small pieces."""
    for _ in range(100):
        parser.feed("abc")


def strictly(text: str) -> Any:
    """Decode JSON as RFC 8259 has it. Raises ValueError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


_SCALAR = re.compile(r'(?<=[:\[,>=\n])( ?)(-?\d[\w.+-]*|true|false|null|"[^"\n]*")')
_WRONG_VALUES = ("NaN", "-Infinity", "Infinity", "01", ".5", "0x1F", "+1", "1_0", "'a'")


def spoiled(text: str) -> Iterator[str]:
    """An output with what JSON does not have: control characters in strings, odd numbers."""
    quotes = [place + 1 for place, char in enumerate(text) if char == '"'][:40]
    for place in quotes:
        for raw in ("\n", "\x01", "\t"):
            yield text[:place] + raw + text[place:]
    for found in itertools.islice(_SCALAR.finditer(text), 12):
        for value in _WRONG_VALUES:
            yield text[: found.start(2)] + value + text[found.end(2) :]


_PIECES = [*'{}[]()<>|=:,"\'\\/;', "\n", " ", "é🙂", '"name"', '"arguments"', '"parameters"',
           "true", "None", "-0.5e3", '"\\u00', "\\ud83d", "x" * 70, '{"name": "f", "arguments": {',
           '[{"name": "f", "arguments": {}}]', "</", "```", "json"]  # fmt: skip


class ToolParserKit(ParserKit, CallFormChecks):
    """For what `register_tool_parsers` registers."""

    kind = "tool_parser"

    def make(self, sample: Sample | None = None) -> Any:
        """A parser for the request that a sample belongs to."""
        return self.parser_class(tools=() if sample is None else sample.tools)

    def check_events(self, events: Sequence[ParserEvent]) -> None:
        """Calls are numbered from 0, one after another; one that ends has valid JSON."""
        count, arguments, inside = 0, "", False
        for event in events:
            match event:
                case Content(text):
                    assert text, "an event without text"
                case ToolCallStart(index, name):
                    assert index == count, "calls are numbered in order, from 0"
                    assert name, "a call without a name"
                    count, arguments, inside = count + 1, "", True
                case ToolCallArguments(index, fragment):
                    assert inside and index == count - 1, "arguments of no open call"
                    assert fragment, "an event without text"
                    arguments += fragment
                case ToolCallEnd(index):
                    assert inside and index == count - 1, "the end of no open call"
                    inside = False
                    assert isinstance(strictly(arguments), dict), arguments
                case Reasoning():
                    raise AssertionError("a tool parser knows no thought")

    def opening(self) -> str:
        """The beginning of a sample's call, up to its arguments; "" without samples."""
        for sample in self.samples:
            if any(not isinstance(arguments, str) and arguments for _, arguments in sample.calls):
                parser = self.make(sample)
                for place, char in enumerate(sample.text):
                    if any(isinstance(e, ToolCallArguments) for e in parser.feed(char)):
                        return sample.text[: place + 1]
        return ""

    def hostile(self) -> Iterator[tuple[str, int]]:
        """(text, how often it is repeated in a megabyte)"""
        yield from super().hostile()
        size = 1_000_000 // 4
        marks = self.marks()
        for text in (*marks, *(mark[:-1] for mark in marks[:4]), "".join(marks)):
            if text:
                yield text, size // len(text)
        opening = self.opening()
        if opening:
            yield opening, size // len(opening)
            for lead in ("", '"a": '):  # Where a value may stand, in Python and in JSON.
                yield opening + lead + "[" * 1_000_000, 1
                for text in ('{"a":', '"' + "\\\\" * 50_000, "x" * 100_000, '"a": '):
                    yield opening + lead + text * (size // len(text)), 1
        for sample in self.samples[:1]:
            yield sample.text, size // len(sample.text)

    def leads(self) -> Iterator[str]:
        """Also in the middle of a call's arguments, and of a string in them."""
        yield from super().leads()
        if opening := self.opening():
            yield from (opening, opening + '"a": "')

    def test_arguments_are_strict_json(self, sample: Sample) -> None:
        """A call that ends has JSON, whatever the model wrote in its place: raw control
        characters, NaN, numbers as other languages have them."""
        if not sample.calls:
            pytest.skip("a sample without calls")
        for text in spoiled(sample.text):
            events = run(self.make(sample), [text])
            try:
                self.check_events(events)
            except ValueError as error:
                pytest.fail(f"{text!r} ends a call whose arguments are no JSON: {error}")
            assert fold(run(self.make(sample), list(text))) == fold(events), repr(text)

    def test_text_without_marks_is_passed_on_as_it_is(self) -> None:
        """Letters, spaces and newlines mean nothing to a tool parser."""

        def check(text: str) -> None:
            assert fold(run(self.make(), [text])).content == (text or None), repr(text)

        self.property(check, text=st.text("aZé🙂 \n.,", max_size=40))


class ReasoningParserKit(ParserKit):
    """For what `register_reasoning_parsers` registers."""

    kind = "reasoning_parser"
    thought_end: ClassVar[str] = ""
    """The text with which the thought of a sample ends for good, where there is one: thought has
    ended when it has come, and not before."""

    def make(self, sample: Sample | None = None) -> Any:
        """A parser for the request that a sample belongs to."""
        return self.parser_class(thinking=True if sample is None else sample.thinking)

    def check_events(self, events: Sequence[ParserEvent]) -> None:
        """Content and thought, never empty."""
        for event in events:
            assert isinstance(event, Content | Reasoning), f"{event}: a tool parser's"
            assert event.text, "an event without text"

    def marks(self) -> list[str]:
        """Texts that mean something to the parser."""
        return [*super().marks(), *([self.thought_end] if self.thought_end else [])]

    def hostile(self) -> Iterator[tuple[str, int]]:
        """(text, how often it is repeated in a megabyte)"""
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
        """`reasoning_ended` is true from there on: a grammar may begin."""
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
        """Also in garbage."""

        def check(text: str) -> None:
            parser = self.make()
            ended = parser.reasoning_ended
            for char in text:
                parser.feed(char)
                assert parser.reasoning_ended or not ended
                ended = parser.reasoning_ended

        self.property(check, text=self.texts())

    def test_words_are_lost_in_neither(self) -> None:
        """Text without marks is thought or answer, as it is."""

        def check(text: str, thinking: bool) -> None:
            parser = self.parser_class(thinking=thinking)
            found = fold(run(parser, [text]))
            assert (found.reasoning or "") + (found.content or "") in self.unchanged(text), repr(
                text
            )

        self.property(check, text=st.text("aZé🙂.,", max_size=40), thinking=st.booleans())

    def unchanged(self, text: str) -> tuple[str, ...]:
        """What text without marks may become."""
        return (text,)

    def test_a_tool_parser_sees_the_answer_alone(self, sample: Sample) -> None:
        """The chain hands thought past the tool parser."""
        tools = self.plugins()["tool_parser"].load("hermes")()
        chain = OutputParser(self.make(sample), tools)
        found: ParsedMessage = fold(run(chain, list(sample.text)))
        assert found.reasoning == sample.reasoning
