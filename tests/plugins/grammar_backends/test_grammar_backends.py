"""Both grammar backends: whatever their masks leave to chance is what the grammar asks for."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schemas import wrong

import jackfield
from jackfield.core.grammars.vocabulary import make_vocabulary
from jackfield.core.protocols.grammars import GrammarSpec, Vocabulary
from jackfield.core.registry import load_plugins
from jackfield.core.text.tokenizer import Tokenizer

MODEL = Path(jackfield.__file__).parent / "plugins/models/embedded"
SIZE = 1600
"""Larger than the tokenizer's, and no multiple of 32 away from it."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "height": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "pair": {
            "type": "object",
            "properties": {"x": {"const": "é🙂\n"}, "y": {"type": ["integer", "null"]}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(MODEL))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    end = tokenizer.eos_token_id
    assert end is not None
    return make_vocabulary(tokenizer, SIZE, [end], compact_json=False)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> Any:
    pytest.importorskip(request.param)
    kind = load_plugins()["structured_backend"].load(request.param)
    assert kind.unavailable() is None
    return kind(vocabulary)


def allowed(matcher: Any) -> list[int]:
    row = np.full(SIZE // 32, -1, dtype=np.int32)
    matcher.fill_bitmask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def walk(backend: Any, vocabulary: Vocabulary, spec: GrammarSpec, seed: int) -> str | None:
    """A text by chance alone, short tokens first when it gets long; None: it did not end."""
    draw = random.Random(seed)
    matcher = backend.compile(spec).matcher()
    (end,) = vocabulary.eos_token_ids
    text = b""
    for _ in range(400):
        tokens = allowed(matcher)
        assert tokens, f"a dead end after {text!r}"
        assert all(t == end or vocabulary.token_bytes[t] for t in tokens), "a padded or special id"
        token = end if end in tokens and draw.random() < 0.5 else draw.choice(tokens)
        if len(text) > 100 and token != end:
            closing = [t for t in tokens if vocabulary.token_bytes[t] in (b'"', b"}", b"]", b",")]
            token = draw.choice(closing or tokens)
        assert matcher.accept([token])
        if token == end:
            assert matcher.is_terminated()
            return text.decode()
        assert not matcher.is_terminated()
        text += vocabulary.token_bytes[token]
    return None


CASES: list[tuple[str, Any, Callable[[str], bool]]] = [
    ("json", PERSON, lambda text: wrong(json.loads(text), PERSON) is None),
    ("json", {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
     lambda text: isinstance(json.loads(text), list)),
    ("json_object", None, lambda text: isinstance(json.loads(text), dict)),
    ("regex", r"(cat|dog)s?-[0-9]{2,4}", lambda text: bool(
        re.fullmatch(r"(cat|dog)s?-[0-9]{2,4}", text))),
    ("regex", r"[^\n]{3}é+", lambda text: bool(re.fullmatch(r"[^\n]{3}é+", text))),
    ("choice", ["yes", "no", 'a "quoted"\nline\\', "日本語 🙂"],
     lambda text: text in ("yes", "no", 'a "quoted"\nline\\', "日本語 🙂")),
    ("grammar", 'start: "(" inner ")"\ninner: "x" | "y" inner', lambda text: bool(
        re.fullmatch(r"\(y*x\)", text))),
    ("structural_tag",
     {"structures": [{"begin": "<f=one>", "schema": PERSON["$defs"]["pair"], "end": "</f>"},
                     {"begin": "<f=two>", "schema": {"type": "integer"}, "end": "</f>"}],
      "triggers": ["<f="], "at_least_one": True, "stop_after_first": True},
     lambda text: _tag(text)),
]  # fmt: skip


def _tag(text: str) -> bool:
    match = re.fullmatch(r"<f=(one|two)>(.*)</f>", text, re.DOTALL)
    assert match is not None, text
    value = json.loads(match[2])
    if match[1] == "two":
        return isinstance(value, int)
    return wrong(value, PERSON["$defs"]["pair"]) is None


@pytest.mark.parametrize(
    ("kind", "spec_value", "right"), CASES, ids=[str(c[:2])[:40] for c in CASES]
)
def test_any_way_through_a_grammar_is_right(
    backend: Any, vocabulary: Vocabulary, kind: Any, spec_value: Any, right: Callable[[str], bool]
) -> None:
    if kind == "regex" and "[^" in spec_value and type(backend).__name__ == "XGrammar":
        pytest.skip("its negated classes take bytes that are no UTF-8: docs/how-to says so")
    spec = GrammarSpec(
        kind, spec_value if isinstance(spec_value, str) else json.dumps(spec_value or {})
    )
    ended = 0
    for seed in range(12):
        text = walk(backend, vocabulary, spec, seed)
        if text is not None:
            ended += 1
            assert right(text), text
    assert ended >= 4


def test_free_text_goes_around_structural_tags(backend: Any, tokenizer: Tokenizer) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
           "triggers": ["<f>"]}  # fmt: skip
    compiled = backend.compile(GrammarSpec("structural_tag", json.dumps(tag)))
    good = tokenizer.encode("Well, <f>12</f> and <f>3</f>. Done", add_special_tokens=False)
    bad = tokenizer.encode("Well, <f>twelve", add_special_tokens=False)
    matcher = compiled.matcher()
    assert matcher.accept(good) and tokenizer.eos_token_id in allowed(matcher)
    assert not compiled.matcher().accept(bad)


def test_the_end_is_allowed_where_the_grammar_may_end_and_only_there(
    backend: Any, vocabulary: Vocabulary
) -> None:
    (end,) = vocabulary.eos_token_ids
    (a,) = vocabulary.encode("a")
    matcher = backend.compile(GrammarSpec("regex", "a{2,3}")).matcher()
    seen = []
    for _ in range(4):
        tokens = set(allowed(matcher))
        seen.append((end in tokens, bool(tokens - {end})))
        if len(seen) < 4:
            assert matcher.accept([a])
    assert seen == [(False, True), (False, True), (True, True), (True, False)]


def test_what_a_grammar_does_not_allow_is_not_accepted(
    backend: Any, vocabulary: Vocabulary
) -> None:
    matcher = backend.compile(GrammarSpec("choice", '["yes"]')).matcher()
    assert not matcher.accept(vocabulary.encode("no"))


def test_rolled_back_tokens_are_as_if_they_had_not_been(
    backend: Any, vocabulary: Vocabulary
) -> None:
    matcher = backend.compile(GrammarSpec("json", json.dumps(PERSON))).matcher()
    before = allowed(matcher)
    tokens = vocabulary.encode('{"name": "x"')
    assert matcher.accept(tokens)
    assert allowed(matcher) != before
    matcher.rollback(len(tokens))
    assert allowed(matcher) == before


def test_matchers_of_one_grammar_do_not_share_their_place(
    backend: Any, vocabulary: Vocabulary
) -> None:
    grammar = backend.compile(GrammarSpec("regex", "ab"))
    first, other = grammar.matcher(), grammar.matcher()
    assert first.accept(vocabulary.encode("a"))
    assert allowed(first) != allowed(other)


def test_compact_json_has_no_room_for_whitespace(backend: Any, tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_id
    assert end is not None
    compact = type(backend)(make_vocabulary(tokenizer, SIZE, [end], compact_json=True))
    schema = {"type": "array", "items": {"type": "boolean"}}
    grammar = compact.compile(GrammarSpec("json", json.dumps(schema)))
    good = tokenizer.encode("[true, false]", add_special_tokens=False)
    assert grammar.matcher().accept(good)
    assert not grammar.matcher().accept(tokenizer.encode("[ true", add_special_tokens=False))


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json", '{"type": "heap"}'),
        GrammarSpec("json", '{"type": "array", "minItems": 3, "maxItems": 2}'),
        GrammarSpec("regex", "(unclosed"),
        GrammarSpec("grammar", "start: missing_rule"),
        GrammarSpec("structural_tag", '{"structures": [], "triggers": []}'),
    ],
    ids=lambda spec: spec.text[:24],
)
def test_a_wrong_grammar_is_reported_with_a_reason(backend: Any, spec: GrammarSpec) -> None:
    with pytest.raises(ValueError, match=r"\w{3}"):
        backend.compile(spec)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"allOf": [{"type": "object"}, {"minProperties": 1}]}, "allOf"),
        ({"minimum": 3}, "minimum"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "string", "format": "iban"}, "iban"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "pattern"),
        ({"$ref": "http://elsewhere/x"}, "elsewhere"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"anyOf": []}, "anyOf"),
        ({"type": "object", "required": ["city"], "additionalProperties": False}, "city"),
        ({"type": "string", "format": "date", "maxLength": 9}, "maxLength"),
        ({"type": "string", "format": "date", "minLength": 90}, "minLength"),
        ({"type": "string", "format": "date", "pattern": "^a"}, "pattern"),
        ({"format": "date"}, "format"),
        ({"maxLength": 2}, "maxLength"),
        ({"pattern": "^a$"}, "pattern"),
        ({"maxProperties": 1}, "maxProperties"),
        ({"required": ["city"]}, "required"),
        ({"type": "object", "required": ["city"]}, "city"),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, "minimum"),
        ({"anyOf": [{"type": "string"}], "format": "date"}, "format"),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "properties"),
        ({"oneOf": [{"type": "string"}], "maxLength": 3}, "maxLength"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minItems": 2}, "minItems"),
        ({"enum": [1, "a"], "type": "string"}, "type"),
        ({"const": 1, "type": "string"}, "type"),
        ({"enum": ["a", "b"], "pattern": "a"}, "pattern"),
        ({"type": "string", "pattern": "^(?!a)b"}, "looks around"),
        ({"type": "string", "pattern": "(a$)b"}, "$"),
        ({"type": "string", "pattern": "(^a|b)c"}, "^"),
        ({"type": "string", "pattern": "\\Aa\\Z"}, "\\A"),
        ({"patternProperties": {"^(?=a)b": {}}}, "looks around"),
        ({"properties": {"a": {}}, "patternProperties": {"^a": {"type": "null"}}}, "properties"),
        ({"required": ["ab"], "patternProperties": {"^a": {"type": "null"}}}, "required"),
    ],
)
def test_xgrammar_refuses_what_it_would_pass_over(schema: Any, word: str) -> None:
    kind = load_plugins()["structured_backend"].load("xgrammar")
    reason = kind.refusal(GrammarSpec("json", json.dumps(schema)))
    assert reason is not None and word in reason
    named = {"type": "object", "properties": {word: {"type": "string"}}}
    assert kind.refusal(GrammarSpec("json", json.dumps(named))) is None


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 2**63, "maximum": 2**70},
        {"exclusiveMinimum": 1e29, "maximum": 1e30},
        {"minimum": -(2**70), "maximum": -(2**63) - 1},
    ],
)
def test_llguidance_refuses_bounds_of_integers_that_it_would_change(bounds: Any) -> None:
    kind = load_plugins()["structured_backend"].load("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer", **bounds}}}
    tag = {"begin": "<a>", "schema": schema, "end": "</a>"}
    tags = json.dumps({"structures": [tag], "triggers": ["<a>"]})
    for spec in (GrammarSpec("json", json.dumps(schema)), GrammarSpec("structural_tag", tags)):
        assert "beyond integers of 64 bits" in (kind.refusal(spec) or ""), spec.kind
    assert kind.refusal(GrammarSpec("json", '{"type": "number", "minimum": 1e40}')) is None


def test_llguidance_serves_unsigned_integers_of_64_bits(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    kind = load_plugins()["structured_backend"].load("llguidance")
    schema = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    spec = GrammarSpec("json", json.dumps(schema))
    assert kind.refusal(spec) is None
    grammar = kind(vocabulary).compile(spec)
    assert grammar.matcher().accept(tokenizer.encode("9007", add_special_tokens=False))
    assert not grammar.matcher().accept(tokenizer.encode("-9", add_special_tokens=False))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("b", ["b", "abc"], ["ac"]),
        ("^b", ["bc"], ["ab"]),
        ("b$", ["ab"], ["bc"]),
        ("^b$", ["b"], ["ab", "bc"]),
        ("b|c", ["xby", "xcy"], ["a"]),
    ],
)
def test_patterns_are_found_anywhere_in_a_string(
    backend: Any, vocabulary: Vocabulary, pattern: str, right: list[str], wrong: list[str]
) -> None:
    string = backend.compile(
        GrammarSpec("json", json.dumps({"type": "string", "pattern": pattern}))
    )
    named = backend.compile(
        GrammarSpec(
            "json",
            json.dumps({"type": "object", "patternProperties": {pattern: {"const": 1}},
                        "additionalProperties": False}),
        )
    )  # fmt: skip
    (end,) = vocabulary.eos_token_ids
    for text in (*right, *wrong):
        for grammar, written in ((string, f'"{text}"'), (named, f'{{"{text}":1}}')):
            fits = grammar.matcher().accept([*vocabulary.encode(written), end])
            assert fits is (text in right), written


def test_an_anchor_of_one_alternative_is_refused_where_it_would_be_misread() -> None:
    kind = load_plugins()["structured_backend"].load("xgrammar")
    for pattern in ("^a|b", "a|b$"):
        for schema in (
            {"type": "string", "pattern": pattern},
            {"patternProperties": {pattern: {}}},
        ):
            assert "pattern" in (kind.refusal(GrammarSpec("json", json.dumps(schema))) or "")


def test_only_the_backend_that_reads_gbnf_takes_it() -> None:
    registry = load_plugins()["structured_backend"]
    spec = GrammarSpec("grammar", 'root ::= "a" | "b"')
    assert registry.load("xgrammar").refusal(spec) is None
    assert "GBNF" in registry.load("llguidance").refusal(spec)


def test_a_missing_package_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("xgrammar", "llguidance"):
        reason = load_plugins()["structured_backend"].load(name).unavailable()
        assert reason is not None and "jackfield[structured]" in reason


def test_bounded_strings_are_allowed_what_the_package_would_allow(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    from jackfield.plugins.grammar_backends import xgrammar

    properties = {
        "short": {"type": "string", "maxLength": 9},
        "exact": {"type": "string", "minLength": 3, "maxLength": 3},
        "maxLength": {"type": ["string", "null"], "maxLength": 4},
        "either": {"anyOf": [{"type": "string", "maxLength": 2}, {"$ref": "#/$defs/empty"}]},
        "one": {"type": "string", "enum": ["ab", "c"], "maxLength": 2},
    }
    schema = {
        "$defs": {"empty": {"type": "string", "maxLength": 0}},
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    backend, spec = xgrammar.XGrammar(vocabulary), GrammarSpec("json", json.dumps(schema))
    ours = backend.compile(spec)
    monkeypatch.setattr(xgrammar, "LONGEST_EXPRESSION", -1)
    packages = backend.compile(spec)
    for seed in range(4):
        draw, pair = random.Random(seed), [ours.matcher(), packages.matcher()]
        for _ in range(100):
            tokens, other = (allowed(matcher) for matcher in pair)
            assert tokens == other
            token = draw.choice(tokens)
            assert all(matcher.accept([token]) for matcher in pair)
            if token in vocabulary.eos_token_ids:
                break


def test_many_masks_at_once_are_those_of_each(backend: Any, vocabulary: Vocabulary) -> None:
    grammars = [
        backend.compile(GrammarSpec("json", json.dumps(PERSON))),
        backend.compile(GrammarSpec("regex", "(ab|c)*")),
    ]
    matchers = [grammars[number % 2].matcher() for number in range(9)]
    draw = random.Random(3)
    for number, matcher in enumerate(matchers):
        for _ in range(number):
            remaining = [item for item in allowed(matcher) if item not in vocabulary.eos_token_ids]
            assert matcher.accept([draw.choice(remaining)])
    for selection in (matchers, matchers[::2]):
        for rows in (range(len(selection)), range(len(selection) + 2)[2:]):
            bits = np.full((len(selection) + rows[0], SIZE // 32), -1, dtype=np.int32)
            assert type(selection[0]).fill_bitmasks(selection, bits, rows) == [None] * len(
                selection
            )
            assert (bits[: rows[0]] == -1).all(), "not asked for"
            for matcher, row in zip(selection, rows, strict=True):
                ids = np.flatnonzero(np.unpackbits(bits[row].view(np.uint8), bitorder="little"))
                assert ids.tolist() == allowed(matcher)


def test_a_token_each_at_once_is_as_one_by_one(backend: Any, vocabulary: Vocabulary) -> None:
    (end,) = vocabulary.eos_token_ids
    grammar = backend.compile(GrammarSpec("regex", "(ab|c)*"))
    matchers = [grammar.matcher() for _ in range(6)]
    a, b, c = (vocabulary.encode(letter)[-1] for letter in "abc")
    kind = type(matchers[0])
    assert list(kind.accept_each(matchers, [a, c, end, c, a, c])) == [True] * 6
    for matcher, place in zip(matchers, (a, c, end, c, a, c), strict=True):
        assert matcher.is_terminated() == (place == end)
        if place != end:
            assert (b in allowed(matcher)) == (place == a)
    rest = [matchers[0], matchers[1], matchers[3], matchers[4]]
    outputs = list(kind.accept_each(rest, [b, b, end, end]))
    assert [output is True for output in outputs] == [True, False, True, False]
    assert c in allowed(matchers[0]) and c in allowed(matchers[5])


def test_masks_leave_half_of_the_cores_to_the_event_loop() -> None:
    threads = pytest.importorskip("jackfield.plugins.grammar_backends.llguidance").THREADS
    assert 1 <= threads <= min(8, max(1, (os.cpu_count() or 1) // 2))
