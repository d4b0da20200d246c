"""The parser kits notice planted bugs: around a tool parser and a reasoning parser in the box."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.core.protocols.parsers import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from jackfield.plugins.conformance.parsers import (
    ReasoningParserKit,
    Sample,
    ToolParserKit,
    spoiled,
    strictly,
    tool,
)
from jackfield.plugins.reasoning.think_tags import ThinkTagsReasoning
from jackfield.plugins.tools.hermes import HermesToolParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'


class Short:
    """Takes less time than the kits do by default."""

    examples = 25
    seconds = 0.05

    def hostile(self) -> Any:
        yield "{", 80_000
        yield "<tool_call>", 2_000
        yield "<think>", 2_000


class ToolKit(Short, ToolParserKit):
    name = "subject"
    plugin = plugin_of("tool_parser", "subject", HermesToolParser)
    markers = ("<tool_call>", "</tool_call>")
    samples = [
        Sample(f"Well. {CALL}", content="Well.", calls=[("f", {"a": 1, "b": "x"})]),
        Sample(
            f"{CALL}\n{CALL}",
            calls=[("f", {"a": 1, "b": "x"}), ("f", {"a": 1, "b": "x"})],
        ),
        Sample(CALL[:40], calls=[("f", "{")]),
        Sample("No call <tool_", content="No call <tool_"),
    ]


Events = list[ParserEvent]


def changed(change: Callable[[ParserEvent], Any]) -> type:
    """The parser with each event replaced: by one, by several, or by none."""

    def of(events: Events) -> Events:
        parts: Events = []
        for event in events:
            new = change(event)
            parts += new if isinstance(new, list) else [] if new is None else [new]
        return parts

    return subclass(
        HermesToolParser,
        feed=lambda self, text, token_ids=(): of(HermesToolParser.feed(self, text, token_ids)),
        finish=lambda self: of(HermesToolParser.finish(self)),
    )


def fed(parser: type, feed: Callable[[Any, str], str]) -> type:
    """The parser behind a function that changes each piece of the text."""
    return subclass(
        parser,
        feed=lambda self, text, token_ids=(): parser.feed(self, feed(self, text), token_ids),  # type: ignore[attr-defined]
    )


def nothing(self: Any, text: str) -> str:
    return "" if text == "<" else text


def raises_on_garbage(self: Any, text: str) -> str:
    if any(char in text for char in "=()|;"):
        raise ValueError("no such character")
    return text


def unspaced(self: Any, text: str) -> str:
    return text.strip(" ")


def without_dots(self: Any, text: str) -> str:
    return text.strip(".")


def looks_through_all(self: Any, text: str) -> str:
    self.all_of_it = getattr(self, "all_of_it", "") + text
    self.seen = "</never>" in self.all_of_it
    return text


def counts_each_letter(self: Any, text: str) -> str:
    self.all_of_it = getattr(self, "all_of_it", "") + text
    sum(1 for char in self.all_of_it if char == "{")
    return text


def from_one(event: ParserEvent) -> Any:
    if isinstance(event, ToolCallStart):
        return ToolCallStart(event.index + 1, event.name, event.id)
    return event


class EndsAnything(HermesToolParser):
    """Ends each call that it has begun, however far it came."""

    def __init__(self, *, tools: Any = ()) -> None:
        super().__init__(tools=tools)
        self.open_calls: set[int] = set()

    def feed(self, text: str, token_ids: Any = ()) -> Events:
        return self.seen(super().feed(text, token_ids))

    def seen(self, events: Events) -> Events:
        for event in events:
            if isinstance(event, ToolCallStart):
                self.open_calls.add(event.index)
            if isinstance(event, ToolCallEnd):
                self.open_calls.discard(event.index)
        return events

    def finish(self) -> Events:
        events = self.seen(super().finish())
        return [*events, *(ToolCallEnd(index) for index in sorted(self.open_calls))]


class Lax(HermesToolParser):
    """Reads whole calls with a lax decoder, and hands their text on as it stands."""

    call_form = None
    new = False

    def __init__(self, *, tools: Any = ()) -> None:
        self.parts: list[str] = []

    def feed(self, text: str, token_ids: Any = ()) -> Events:
        self.parts.append(text)
        return []

    def finish(self) -> Events:
        text = "".join(self.parts)
        head, mark, rest = text.partition("<tool_call>")
        source, end, tail = rest.partition("</tool_call>")
        try:
            values = self.decode(source)
            name, arguments = values["name"], values["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return [Content(text)] if text else []
        if not (mark and end and name and isinstance(name, str) and isinstance(arguments, dict)):
            return [Content(text)] if text else []
        events: Events = [Content(head)] if head else []
        events += [ToolCallStart(0, name), ToolCallArguments(0, self.encode(source, arguments)),
                   ToolCallEnd(0)]  # fmt: skip
        return [*events, Content(tail)] if tail else events

    def decode(self, source: str) -> Any:
        return json.loads(source)

    def encode(self, source: str, arguments: Any) -> str:
        return json.dumps(arguments)


class LaxStrings(Lax):
    def decode(self, source: str) -> Any:
        return json.loads(source, strict=False, parse_constant=lambda name: None)

    def encode(self, source: str, arguments: Any) -> str:
        return source[source.index("{", source.index('"arguments"')) : source.rindex("}")]


class LaxKit(ToolKit):
    """For parsers that read one call, once the text is over."""

    samples = [Sample(f"Well. {CALL}", content="Well. ", calls=[("f", {"a": 1, "b": "x"})])]


MEANS, CUT = "test_a_sample_means_what_it_says", "test_a_sample_cut_anywhere_means_the_same"
ENDS, ANY = "test_a_sample_may_end_anywhere", "test_any_cutting_gives_the_same_fold"
RAISES, LINEAR = "test_no_text_makes_it_raise", "test_a_megabyte_takes_linear_time"
TINY, SAME = (
    "test_tiny_pieces_take_linear_time",
    "test_a_piece_costs_the_same_however_much_came_before",
)
STRICT, PLAIN = (
    "test_arguments_are_strict_json", "test_text_without_marks_is_passed_on_as_it_is",
)  # fmt: skip
FORCED, ESCAPES = "test_forced_calls_are_read_back", "test_no_call_escapes_a_strict_grammar"

ORDER, MEET = (
    "test_marks_in_any_order_give_the_same_fold", "test_parsers_of_one_request_do_not_meet",
)  # fmt: skip


class Shares(HermesToolParser):
    """Its text is the class's, emptied for each new parser."""

    all_text: ClassVar[list[str]] = []

    def __init__(self, *, tools: Any = ()) -> None:
        super().__init__(tools=tools)
        self.all_text.clear()

    def feed(self, text: str, token_ids: Any = ()) -> Events:
        self.all_text.append(text)
        held = "".join(self.all_text)
        self.all_text[:] = [held]
        if held.endswith("<"):
            return []
        self.all_text.clear()
        return super().feed(held, token_ids)

    def finish(self) -> Events:
        return [*super().feed("".join(self.all_text)), *super().finish()]


class ChangesTools(HermesToolParser):
    """Each time anew: the kit's runs in this process have one set of tools."""

    def __init__(self, *, tools: Any = ()) -> None:
        super().__init__(tools=tools)
        for each in tools:
            each["function"]["parsers"] = each["function"].get("parsers", 0) + 1


def drops_the_rest(self: Any) -> Events:
    """What is held back, because it may become a mark, is lost at the end."""
    return [event for event in HermesToolParser.finish(self) if not isinstance(event, Content)]


class EndsTwice(HermesToolParser):
    """Ends the last call once more when the output is over."""

    calls = 0

    def feed(self, text: str, token_ids: Any = ()) -> Events:
        events = super().feed(text, token_ids)
        self.calls += sum(isinstance(event, ToolCallEnd) for event in events)
        return events

    def finish(self) -> Events:
        events = super().finish()
        return [*events, ToolCallEnd(self.calls - 1)] if self.calls else events


def raises_between_marks(self: Any, text: str) -> str:
    """Two opening marks in one piece, which a model that stutters writes."""
    if "<tool_call><tool_call>" in text:
        raise IndexError("no call is open")
    return text


def upper_booleans(event: ParserEvent) -> Any:
    """Rewrites what looks like Python's, in strings, too."""
    if isinstance(event, ToolCallArguments):
        return ToolCallArguments(event.index, event.fragment.replace("x", "X"))
    return event


TOOL_MUTANTS = {
    "parsers share their text": Mutant(Shares, (MEET,)),
    "the request's tools are changed": Mutant(
        ChangesTools,
        (MEET,),
        changes={
            "samples": [
                Sample(CALL, calls=[("f", {"a": 1, "b": "x"})], tools=[tool("f", a="integer")])
            ]
        },
    ),
    "half a mark at the end is lost": Mutant(
        subclass(HermesToolParser, finish=drops_the_rest), (PLAIN, MEANS)
    ),
    "the last call ends twice": Mutant(EndsTwice, (MEANS, ENDS, ANY, STRICT, FORCED)),
    "two marks raise": Mutant(
        fed(HermesToolParser, raises_between_marks), (ORDER, LINEAR), perhaps=(ANY,)
    ),
    "strings are rewritten": Mutant(changed(upper_booleans), (MEANS,)),
    "calls are numbered from one": Mutant(
        changed(from_one), (MEANS, CUT, ENDS, ANY, STRICT, FORCED, MEET)
    ),
    "content is lost": Mutant(
        changed(lambda event: None if isinstance(event, Content) else event), (MEANS, PLAIN)
    ),
    "calls have no end": Mutant(
        changed(lambda event: None if isinstance(event, ToolCallEnd) else event), (MEANS, FORCED)
    ),
    "a call that is cut off ends": Mutant(EndsAnything, (ENDS, MEANS, ANY, STRICT)),
    "a call without a name": Mutant(
        changed(
            lambda event: (
                ToolCallStart(event.index, "") if isinstance(event, ToolCallStart) else event
            )
        ),
        (MEANS, ENDS, ANY, STRICT, FORCED),
    ),
    "events without text": Mutant(
        changed(lambda event: [event, Content("")] if isinstance(event, Content) else event),
        (MEANS, ENDS, ANY, STRICT, ESCAPES, RAISES, ORDER),
    ),
    "thought from a tool parser": Mutant(
        changed(lambda event: Reasoning(event.text) if isinstance(event, Content) else event),
        (MEANS, ENDS, ANY, STRICT, ESCAPES, RAISES, PLAIN, ORDER),
    ),
    "arguments after the end": Mutant(
        changed(
            lambda event: (
                [event, ToolCallArguments(event.index, " ")]
                if isinstance(event, ToolCallEnd)
                else event
            )
        ),
        (MEANS, ENDS, ANY, STRICT, FORCED),
    ),
    "a piece is lost": Mutant(
        fed(HermesToolParser, nothing),
        (CUT, ENDS, MEANS, ANY, STRICT, FORCED, ESCAPES, ORDER, MEET),
    ),
    "garbage raises": Mutant(
        fed(HermesToolParser, raises_on_garbage),
        (RAISES, ESCAPES, ORDER),
        perhaps=(ANY,),
    ),
    "looks through all text for each piece": Mutant(
        fed(HermesToolParser, looks_through_all), (SAME,)
    ),
    "counts every letter for each piece": Mutant(
        fed(HermesToolParser, counts_each_letter), (TINY, SAME)
    ),
    "spaces are dropped": Mutant(
        fed(HermesToolParser, unspaced),
        (PLAIN, CUT, ENDS, MEANS, ANY, STRICT, FORCED, ESCAPES, ORDER, MEET),
    ),
    "NaN passes": Mutant(Lax, (STRICT, FORCED, ESCAPES), changes={"samples": LaxKit.samples}),
    "raw control characters pass": Mutant(
        LaxStrings, (STRICT, FORCED, ESCAPES), changes={"samples": LaxKit.samples}
    ),
}


class ThinkKit(Short, ReasoningParserKit):
    name = "subject"
    plugin = plugin_of("reasoning_parser", "subject", ThinkTagsReasoning)
    reasoning_end = "</think>"
    samples = [
        Sample("<think>\nWe add.\n</think>\n\nIt is 4.", content="It is 4.", reasoning="We add."),
        Sample("<think>\nLet me", reasoning="Let me"),
        Sample("It is 4. <think>", content="It is 4. <think>"),
    ]


def thinking(**changes: Any) -> type:
    return subclass(ThinkTagsReasoning, **changes)


def shown(change: Callable[[ParserEvent], Any]) -> type:
    """The parser with each event replaced."""

    def of(events: Events) -> Events:
        shown_events = [change(event) for event in events]
        return [item for new in shown_events for item in (new if isinstance(new, list) else [new])]

    return thinking(
        feed=lambda self, text, token_ids=(): of(ThinkTagsReasoning.feed(self, text, token_ids)),
        finish=lambda self: of(ThinkTagsReasoning.finish(self)),
    )


class EndsWithTheAnswer(ThinkTagsReasoning):
    """Says that thought is over when the first of the answer has come."""

    over = False

    def feed(self, text: str, token_ids: Any = ()) -> Events:
        events = super().feed(text, token_ids)
        self.over = self.over or any(isinstance(event, Content) for event in events)
        return events

    def __getattribute__(self, name: str) -> Any:
        if name == "reasoning_ended":
            return object.__getattribute__(self, "over")
        return object.__getattribute__(self, name)


class EndsAtOnce(ThinkTagsReasoning):
    def __getattribute__(self, name: str) -> Any:
        return True if name == "reasoning_ended" else object.__getattribute__(self, name)


class NeverEnds(ThinkTagsReasoning):
    def __getattribute__(self, name: str) -> Any:
        return False if name == "reasoning_ended" else object.__getattribute__(self, name)


class EndsAndBegins(ThinkTagsReasoning):
    """Thought that was over begins again."""

    pieces = 0

    def feed(self, text: str, token_ids: Any = ()) -> Events:
        self.pieces += 1
        return super().feed(text, token_ids)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return value and self.pieces % 7 != 6 if name == "reasoning_ended" else value


THOUGHT = "test_reasoning_ends_where_its_mark_does"
STAYS, WORDS = "test_it_stays_ended_whatever_comes", "test_words_are_lost_in_neither"
CHAIN = "test_a_tool_parser_sees_the_answer_alone"


def forgets_at_the_end(self: Any) -> Events:
    ThinkTagsReasoning.finish(self)
    return []


class BeginsAgainAtTheEnd(ThinkTagsReasoning):
    """Its state is put back for the next output."""

    over = False

    def finish(self) -> Events:
        self.over = True
        return super().finish()

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return value and not self.over if name == "reasoning_ended" else value


def raises_for_a_second_thought(self: Any, text: str) -> str:
    """Thought that begins again raises, if both marks come in one piece."""
    if "</think>" in text and "<think>" in text.partition("</think>")[2]:
        raise ValueError("thought is over")
    return text


def splits_without_care(self: Any, text: str) -> str:
    """A piece that begins with a newline loses it."""
    return text[1:] if text.startswith("\n") and len(text) > 1 else text


class SharesThought(ThinkTagsReasoning):
    """What was thought is the class's, emptied for each new parser."""

    seen: ClassVar[list[str]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen.clear()

    def feed(self, text: str, token_ids: Any = ()) -> Events:
        self.seen.append(text)
        self.seen[:] = ["".join(self.seen)]
        if self.seen[0].endswith("<"):
            return []
        whole = self.seen.pop()
        return super().feed(whole, token_ids)

    def finish(self) -> Events:
        return [*super().feed("".join(self.seen)), *super().finish()]


REASONING_MUTANTS = {
    "what is held back is lost": Mutant(thinking(finish=forgets_at_the_end), (WORDS,)),
    "thought begins again at the end": Mutant(BeginsAgainAtTheEnd, (STAYS,)),
    "a second thought raises": Mutant(
        fed(ThinkTagsReasoning, raises_for_a_second_thought), (ORDER,), perhaps=(ANY,)
    ),
    "newlines at the beginning of a piece": Mutant(
        fed(ThinkTagsReasoning, splits_without_care), (ORDER,)
    ),
    "parsers share their thought": Mutant(SharesThought, (MEET,)),
    "thought ends with the answer": Mutant(EndsWithTheAnswer, (THOUGHT,)),
    "thought is over at once": Mutant(EndsAtOnce, (THOUGHT,)),
    "thought never ends": Mutant(NeverEnds, (THOUGHT,)),
    "thought that was over begins again": Mutant(EndsAndBegins, (STAYS, THOUGHT)),
    "other marks": Mutant(thinking(close=("</thinking>",)), (MEANS, CHAIN, THOUGHT)),
    "the newlines are kept": Mutant(thinking(space="\r"), (MEANS, CHAIN)),
    "the answer is lost": Mutant(
        shown(lambda event: [] if isinstance(event, Content) else event), (MEANS, WORDS)
    ),
    "events without text": Mutant(
        shown(lambda event: [event, Content("")]), (MEANS, ENDS, ANY, RAISES, ORDER)
    ),
    "calls from a reasoning parser": Mutant(
        shown(lambda event: [event, ToolCallEnd(0)]), (MEANS, ENDS, ANY, RAISES, ORDER)
    ),
    "a piece is lost": Mutant(
        fed(ThinkTagsReasoning, nothing),
        (MEANS, CUT, ENDS, CHAIN, ANY, THOUGHT, ORDER, MEET, WORDS),
    ),
    "dots are dropped": Mutant(
        fed(ThinkTagsReasoning, without_dots), (WORDS, CUT, ENDS, MEANS, CHAIN, ANY, ORDER, MEET)
    ),
    "garbage raises": Mutant(
        fed(ThinkTagsReasoning, raises_on_garbage), (RAISES, STAYS, ORDER), perhaps=(ANY,)
    ),
    "a cheap quadratic": Mutant(fed(ThinkTagsReasoning, looks_through_all), (SAME,)),
    "a dear quadratic": Mutant(fed(ThinkTagsReasoning, counts_each_letter), (TINY, SAME)),
}

TestToolMutants = mutant_tests(ToolKit, TOOL_MUTANTS)
TestReasoningMutants = mutant_tests(ThinkKit, REASONING_MUTANTS)


def test_a_sample_that_says_something_else_fails() -> None:
    kit: Any = ToolKit()
    for calls in ([("f", {"a": 2})], [("f", '{"a": 1, "b": "x"}')], []):
        with pytest.raises((AssertionError, ValueError)):
            kit.test_a_sample_means_what_it_says(Sample(CALL, calls=calls))


def test_spoiled_outputs_have_what_json_has_not() -> None:
    texts = list(spoiled(CALL))
    assert any("\x01" in text for text in texts) and any('"a": NaN' in text for text in texts)
    for wrong in ("NaN", "[Infinity]", '"a\nb"', "01", "{'a': 1}"):
        with pytest.raises(ValueError):
            strictly(wrong)
