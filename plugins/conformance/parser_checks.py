"""Checks of every parser of model output, of tool calls or of reasoning, and samples for them."""

from __future__ import annotations

import copy
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

from ...core.output_parsing.output_parser import fold
from ...core.protocols.parsers import (
    ParserEvent,
    ToolCallEnd,
)
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


LAG = 7
"""Letters by which one parser is behind another."""
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
    _tools: ClassVar[Sequence[Sequence[Mapping[str, Any]]]] = ()
    """The samples' tools before the first test."""
    seconds: ClassVar[float] = 3.0
    """Processor seconds per megabyte at most, for text in one piece, on an idle core."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each sample, whose tools are noted before any parser sees them."""
        type(self)._tools = [copy.deepcopy(sample.tools) for sample in self.samples]
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

    def half_marks(self) -> Iterator[str]:
        """Yield every beginning of a mark that is neither a word nor has another mark in it."""
        marks = list(filter(None, self.marks()))
        for half in (mark[:end] for mark in marks for end in range(1, len(mark))):
            if not half.isalnum() and not any(mark in half for mark in marks):
                yield half

    def sequences(self) -> Iterator[str]:
        """Yield marks, their beginnings and a few other texts in every order: two of all, three of
        the marks."""
        marks = list(dict.fromkeys(filter(None, self.marks())))[:5]
        halves = [half for mark in marks for half in (mark[: len(mark) // 2], mark[:-1])]
        texts = list(dict.fromkeys(filter(None, [*marks, *halves, *_BETWEEN])))
        for pair in itertools.product(texts, repeat=2):
            yield "".join(pair)
        for triple in itertools.product(marks[:3], ("a", "\n"), marks[:3], ("", "b"), marks[:3]):
            yield "".join(triple)

    def property(self, check: Callable[..., None], **strategies: Any) -> None:
        """Try `check` with arguments drawn at random, the same in each run."""
        limits = settings(
            max_examples=self.examples,
            derandomize=True,
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

    def test_marks_in_any_order_give_the_same_fold(self) -> None:
        """Whole and letter by letter, whichever mark, or half of it, follows which."""
        for text in self.sequences():
            events = run(self.make(), [text])
            self.check_events(events)
            assert fold(run(self.make(), list(text))) == fold(events), repr(text)

    def test_parsers_of_one_request_do_not_meet(self, sample: Sample) -> None:
        """A request with several choices has a parser for each, fed in turn, and one set of tools,
        which they only read."""
        whole = fold(run(self.make(sample), [sample.text]))
        parsers = [self.make(sample), self.make(sample)]
        events: list[list[ParserEvent]] = [[], []]
        # The second one is some letters behind.
        for at in range(len(sample.text) + LAG):
            for parser, own, place in zip(parsers, events, (at, at - LAG), strict=True):
                if 0 <= place < len(sample.text):
                    own += parser.feed(sample.text[place])
        for parser, own in zip(parsers, events, strict=True):
            own += parser.finish()
            assert fold(own) == whole, "parsers share something"
        written = [tools for each, tools in zip(self.samples, self._tools, strict=True)
                   if each is sample]  # fmt: skip
        assert written in ([sample.tools], []), "it changes the request's tools"

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


_BETWEEN = ("a", " ", "\n", ". =()|;")
_PIECES = [*'{}[]()<>|=:,"\'\\/;', "\n", " ", "é🙂", '"name"', '"arguments"', '"parameters"',
           "true", "None", "-0.5e3", '"\\u00', "\\ud83d", "x" * 70, '{"name": "f", "arguments": {',
           '[{"name": "f", "arguments": {}}]', "</", "```", "json"]  # fmt: skip
