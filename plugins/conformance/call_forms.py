"""Checks that a tool parser reads back what its `call_form` lets a grammar write.

Outputs are drawn at random from the masks of a real grammar over the embedded model's tokens: with
the parser's marks spelled out, and as special tokens.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ...core.config import StructuredOutputsConfig
from ...core.grammars.spec import grammar_spec
from ...core.grammars.tool_calls.call_format import (
    CallableTool,
    forms_of,
    optional_tag,
    required_tag,
)
from ...core.grammars.vocabulary import make_vocabulary
from ...core.output_parsing.output_parser import ParsedMessage, fold
from ...core.protocols.grammars import GrammarSpec, Vocabulary
from ...core.protocols.parsers import CallForm, ParserEvent, ToolCallEnd
from ...core.sampling_params import StructuredOutputsParams
from ...core.text.tokenizer import Tokenizer
from ..grammar_backends.llguidance import LLGuidance

MAX_TOKENS = 500

TOOLS = (
    CallableTool(
        "book-trip",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "class": {"enum": ["éco", "first 🙂", "a<b"]},
                "seats": {"type": "integer", "minimum": 1, "maximum": 9},
                "note": {"type": "string", "maxLength": 6},
                "round": {"type": "boolean"},
                "legs": {"$ref": "#/$defs/legs"},
                "memo": {"type": ["string", "null"]},
                "price": {"type": "number"},
            },
            "required": ["city", "class", "seats", "legs"],
            "additionalProperties": False,
            "$defs": {
                "legs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"day": {"enum": ["lun\n", 7]}, "direct": {"const": True}},
                        "required": ["day"],
                        "additionalProperties": False,
                    },
                    "maxItems": 2,
                }
            },
        },
    ),
    CallableTool("stop", {"type": "object", "properties": {}, "additionalProperties": False}),
    CallableTool(
        "search",
        {
            "type": "object",
            "properties": {
                "limit": {"type": "integer", "maximum": 3, "minimum": 0},
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
            },
        },
    ),
)
LENIENT = tuple(CallableTool(tool.name, tool.schema, strict=False) for tool in TOOLS)


def wrong(name: str, arguments: Any) -> str | None:
    """Return how a call violates its tool's schema, checked by hand; None: it does not."""
    check = {"book-trip": _wrong_trip, "stop": _wrong_stop, "search": _wrong_search}.get(name)
    return "no such tool" if check is None else check(arguments)


def _wrong_trip(arguments: dict[str, Any]) -> str | None:
    names = set(TOOLS[0].schema["properties"])
    checks = {
        "keys": {"city", "class", "seats", "legs"} <= arguments.keys() <= names,
        "city": isinstance(arguments.get("city"), str),
        "class": arguments.get("class") in ("éco", "first 🙂", "a<b"),
        "seats": type(arguments.get("seats")) is int and 1 <= arguments["seats"] <= 9,
        "note": isinstance(arguments.get("note", ""), str) and len(arguments.get("note", "")) <= 6,
        "round": isinstance(arguments.get("round", True), bool),
        "memo": isinstance(arguments.get("memo"), str | None),
        "price": isinstance(arguments.get("price", 0), int | float),
        "legs": isinstance(arguments.get("legs"), list)
        and len(arguments["legs"]) <= 2
        and all(
            leg.get("day") in ("lun\n", 7)
            and leg.get("direct", True) is True
            and leg.keys() <= {"day", "direct"}
            for leg in arguments["legs"]
        ),
    }
    return next((key for key, fine in checks.items() if not fine), None)


def _wrong_stop(arguments: dict[str, Any]) -> str | None:
    return "arguments" if arguments else None


def _wrong_search(arguments: dict[str, Any]) -> str | None:
    limit, code = arguments.get("limit", 0), arguments.get("code", "AA-0")
    if arguments.keys() - {"limit", "code"} or type(limit) is not int or not 0 <= limit <= 3:
        return "limit"
    head, _, tail = code.partition("-")
    fine = len(head) == 2 and head.isascii() and head.isupper() and tail.isdecimal()
    return None if fine else "code"


class Writer:
    """Draws outputs from a grammar."""

    def __init__(self, tag: dict[str, Any], marks: Sequence[str]) -> None:
        """marks: texts that are special tokens in this vocabulary."""
        self.vocabulary, self._single = _vocabulary(tuple(marks))
        params = StructuredOutputsParams(structural_tag=tag)
        spec: GrammarSpec = grammar_spec(params, StructuredOutputsConfig())
        self._grammar = _backend(tuple(marks)).compile(spec)
        (self._end,) = self.vocabulary.eos_token_ids
        self._special = {id: text for text, id in self.vocabulary.special_tokens.items()}

    def _pieces(self, text: str) -> list[int]:
        """Return the tokens of a text: special tokens, and other bytes one by one."""
        ids: list[int] = []
        while text:
            mark = next((m for m in self.vocabulary.special_tokens if text.startswith(m)), None)
            if mark is not None:
                ids.append(self.vocabulary.special_tokens[mark])
            else:
                ids += [self._single[byte] for byte in text[0].encode() if byte in self._single]
            text = text[len(mark or text[0]) :]
        return ids

    def _written(self, ids: Sequence[int]) -> str:
        text = b"".join(
            self._special[id].encode() if id in self._special else self.vocabulary.token_bytes[id]
            for id in ids
        )
        return text.decode("utf-8", "replace")

    def walk(self, draw: random.Random, hints: Sequence[str]) -> str | None:
        """Return a random text, shortened by texts that may end a part of it; None: no end yet."""
        output = _Output(self._grammar.matcher(), self.vocabulary.size)
        while len(output.ids) < MAX_TOKENS:
            for id in self._pieces(draw.choice(hints)) if draw.random() < 0.3 else ():
                if not output.take(id):
                    break
            allowed = output.allowed()
            assert len(allowed), f"a dead end after {self._written(output.ids)!r}"
            ends = self._end in allowed and draw.random() < 0.6
            id = self._end if ends else int(draw.choice(allowed))
            assert output.take(id)
            if id == self._end:
                return self._written(output.ids[:-1])
        return None

    def squeeze(self, text: str) -> str:
        """Remove from the text what the grammar does not allow."""
        output = _Output(self._grammar.matcher(), self.vocabulary.size)
        return self._written([id for id in self._pieces(text) if output.take(id)])


class _Output:
    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._row = np.empty(-(-size // 32), dtype=np.int32)
        self._fresh = False
        self.ids: list[int] = []

    def take(self, id: int) -> bool:
        """Append a token; return whether the grammar allows it."""
        self._fill()
        if not self._row[id >> 5] >> (id & 31) & 1:
            return False
        assert self._matcher.accept([id]), "a token that its own mask allows"
        self.ids.append(id)
        self._fresh = False
        return True

    def allowed(self) -> np.ndarray:
        self._fill()
        return np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little"))

    def _fill(self) -> None:
        if not self._fresh:
            self._matcher.fill_bitmask(self._row)
            self._fresh = True


def hints(forms: Sequence[CallForm]) -> list[str]:
    """Return texts that end a part of a call."""
    texts = {'"', "]", "}", ", "}
    for form in forms:
        texts |= {form.end, form.between, form.close}
        if form.arguments is not None:
            texts |= {form.arguments.end, form.arguments.between}
    return sorted(filter(None, texts))


def mistakes(calls: Sequence[tuple[str, str]]) -> list[tuple[str, str, str | None]]:
    """Return the calls, as (name, arguments), that violate their tools' schemas, and how."""
    judged = [(name, source, wrong(name, json.loads(source))) for name, source in calls]
    return [call for call in judged if call[2] is not None]


def spoiled(text: str, draw: random.Random) -> str:
    """Return a text with parts removed, doubled, or inserted."""
    for _ in range(draw.randint(0, 4)):
        at = draw.randrange(len(text) + 1)
        to = min(len(text), at + draw.randint(0, 12))
        text = text[:at] + draw.choice(["", " ", "\n", "x", text[at:to] * 2, "{", "["]) + text[to:]
    return text


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(str(Path(__file__).parents[1] / "models" / "embedded"))


@functools.cache
def _vocabulary(marks: tuple[str, ...]) -> tuple[Vocabulary, dict[int, int]]:
    """Return the embedded model's vocabulary plus these special tokens, and the ids of single
    bytes.
    """
    tokenizer = _tokenizer()
    end = tokenizer.eos_token_id
    assert end is not None
    size = tokenizer.vocab_size
    full = make_vocabulary(tokenizer, size, [end], compact_json=False)
    special = {mark: size + index for index, mark in enumerate(marks)}
    vocabulary = Vocabulary(
        token_bytes=[
            b"" if written.decode("utf-8", "replace") in special else written
            for written in full.token_bytes
        ]
        + [b""] * len(special),
        size=size + len(special),
        eos_token_ids=full.eos_token_ids,
        encode=full.encode,
        special_tokens=special,
    )
    return vocabulary, {w[0]: id for id, w in enumerate(full.token_bytes) if len(w) == 1}


@functools.cache
def _backend(marks: tuple[str, ...]) -> LLGuidance:
    return LLGuidance(_vocabulary(marks)[0])


class CallFormChecks:
    """Tests of call forms, for `ToolParserKit`."""

    parser_class: Any
    samples: ClassVar[Sequence[Any]]
    marks: Any
    check_events: Any

    def _forms(self) -> tuple[tuple[CallForm, ...], list[tuple[str, ...]]]:
        forms = forms_of(self.parser_class)
        if not forms:
            pytest.skip("it has no call_form")
        pytest.importorskip("llguidance")
        marks = tuple(self.marks())
        return forms, [(), marks] if marks else [()]

    def _read(self, pieces: Sequence[str]) -> list[ParserEvent]:
        parser = self.parser_class(
            tools=[
                {"type": "function", "function": {"name": tool.name, "parameters": tool.schema}}
                for tool in TOOLS
            ]
        )
        events: list[ParserEvent] = [event for piece in pieces for event in parser.feed(piece)]
        return [*events, *parser.finish()]

    def _calls(self, text: str) -> tuple[list[tuple[str, str]], ParsedMessage]:
        """Return complete calls, as (name, arguments), and the message; checks that they do not
        depend on the pieces.
        """
        events = self._read([text])
        message = fold(events)
        assert fold(self._read(list(text))) == message, repr(text)
        self.check_events(events)
        complete = {event.index for event in events if isinstance(event, ToolCallEnd)}
        calls = [
            (call.name, call.arguments)
            for index, call in enumerate(message.tool_calls)
            if index in complete
        ]
        return calls, message

    def test_forced_calls_are_read_back(self) -> None:
        """A grammar of `call_form` allows only calls, according to their schemas."""
        forms, special = self._forms()
        for marks in special:
            for parallel in (True, False):
                writer = Writer(required_tag(forms, TOOLS, parallel=parallel), marks)
                texts = [writer.walk(random.Random(seed), hints(forms)) for seed in range(12)]
                whole = [text for text in texts if text is not None]
                assert len(whole) > 6, texts
                most = 0
                for text in whole:
                    calls, message = self._calls(text)
                    assert calls and not mistakes(calls), text
                    assert message.content is None, (message.content, text)
                    most = max(most, len(calls))
                assert most > 1 if parallel else most == 1, whole

    def test_no_call_escapes_a_strict_grammar(self) -> None:
        """Calls with other arguments, and spoiled ones, do not get through to the parser."""
        forms, special = self._forms()
        for marks in special:
            writer = Writer(optional_tag(forms, TOOLS, parallel=True), marks)
            lenient = Writer(required_tag(forms, LENIENT, parallel=True), marks)
            texts = [sample.text for sample in self.samples]
            for seed in range(12):
                output = lenient.walk(random.Random(seed), hints(forms))
                texts += [output, f"Well. {output}"] if output else []
            assert len(texts) > len(self.samples), "no call with any arguments"
            for seed, text in enumerate(texts * 3):
                let_through = writer.squeeze(spoiled(text, random.Random(seed)))
                assert not mistakes(self._calls(let_through)[0]), (text, let_through)
