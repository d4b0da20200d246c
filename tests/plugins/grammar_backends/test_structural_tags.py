"""Structural tags as llguidance reads them: each format, special tokens, and what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jackfield.core.protocols.grammars import GrammarSpec, Vocabulary

pytest.importorskip("llguidance")
from jackfield.plugins.grammar_backends.llguidance import LLGuidance

SPECIAL = {"<call>": 257, "<|call|>": 258}
VOCABULARY = Vocabulary(
    token_bytes=[bytes([byte]) for byte in range(256)] + [b"", b"", b""],
    size=259,
    eos_token_ids=(256,),
    encode=lambda text: list(text.encode()),
    special_tokens=SPECIAL,
)
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.fixture(scope="module")
def backend() -> LLGuidance:
    return LLGuidance(VOCABULARY)


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def fits(backend: LLGuidance, format: Any, text: str) -> bool:
    """Whether a text is an output; ‹n› is the special token n, all else is bytes."""
    spec = GrammarSpec("structural_tag", json.dumps({"format": format}))
    assert LLGuidance.refusal(spec) is None
    matcher = backend.compile(spec).matcher()
    ids: list[int] = []
    for part in text.replace("›", "‹").split("‹"):
        ids += [int(part)] if part in ("257", "258") else part.encode()
    return all(matcher.accept([id]) for id in (*ids, 256))


TEXT = {"type": "any_text", "excludes": ["bad", "a+b"], "never": "x{3}", "never_first": " *\\["}
TAGS = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [tag("<f=1>", NUMBER, "</f>"), tag("<f=2>", const(""), "</f>")],
}
LIST = {"type": "tags_with_separator", "tags": TAGS["tags"], "separator": ", "}


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (const('a"/\\\n'), ['a"/\\\n'], ["", "a"]),
        ({"type": "regex", "pattern": "[a/]+"}, ["a/a"], ["", "b"]),
        (TEXT, ["", "ba d", "xx [", "ab"], ["bad", " xxx ", " [a]", "1a+b"]),
        ({"type": "sequence", "elements": [const("a"), NUMBER]}, ["a12"], ["12", "a"]),
        ({"type": "or", "elements": [const("a"), const(""), NUMBER]}, ["", "a", "3"], ["a3"]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": const("a")}, ["", "aaa"], ["ab"]),
        ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
        (tag("<", {"type": "any_text", "excludes": [">>"]}, "\n>"),
         ["<\n>", "<a\n\n>", "<\n \n>"], ["<>", "<\n>a", "<>>\n>"]),
        (tag("<", {"type": "regex", "pattern": "(.|\n){1,4}"}, "\n>"),
         ["<a\n>", "<abcd\n>", "<\n\n>"], ["<\n>", "<abcde\n>"]),
        (TAGS, ["", "hi <", "<f=1>7</f>", "a<f=2></f> b <f=1>8</f>c"], ["<f", "<f=1>x", "<f=3>"]),
        ({**TAGS, "stop_after_first": True}, ["a", "a<f=2></f>"], ["<f=2></f>a"]),
        ({**TAGS, "at_least_one": True}, ["<f=2></f>a"], ["", "a<f=2></f>"]),
        (LIST, ["", "<f=2></f>", "<f=1>1</f>, <f=2></f>"], ["<f=1>1</f><f=2></f>", "<f=2></f>, "]),
        ({**LIST, "at_least_one": True, "stop_after_first": True}, ["<f=2></f>"],
         ["", "<f=2></f>, <f=2></f>"]),
    ],
    ids=lambda value: str(value)[:48],
)  # fmt: skip
def test_every_format_lets_through_what_it_says(
    backend: LLGuidance, format: Any, right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert fits(backend, format, text), text
    for text in wrong:
        assert not fits(backend, format, text), text


def test_texts_that_are_special_tokens_are_those(backend: LLGuidance) -> None:
    called = tag("<call>f<|call|>", NUMBER, "<call>")
    assert fits(backend, called, "‹257›f‹258›12‹257›")
    assert not fits(backend, called, "<call>f‹258›12‹257›")
    free = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [called]}
    assert fits(backend, free, "so: ‹257›f‹258›12‹257›. ")
    assert fits(backend, free, "so: <call>f‹258›12‹257›. "), "a trigger may be spelled, and is one"
    assert not fits(backend, free, "so: ‹258›")
    assert not fits(backend, free, "<call>g")
    until = tag("<", {"type": "any_text"}, "|<call>")
    assert fits(backend, until, "<ab|‹257›") and not fits(backend, until, "<ab‹257›")


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ({"type": "dance"}, "no format of this backend's: 'dance'"),
        ({"type": "or", "elements": [{"type": "repeat", "content": NUMBER}]}, "'repeat'"),
        ({"type": "tag", "begin": {"type": "token"}, "content": NUMBER, "end": ""}, "must be text"),
        ({"type": "tag", "begin": "", "content": NUMBER, "end": ["a"]}, "must be text"),
        ({**NUMBER, "style": "glm_xml"}, "style 'glm_xml'"),
        ({"type": "any_text", "max_chars": 3}, "any_text: max_chars"),
    ],
    ids=lambda value: str(value)[:48],
)
def test_what_another_backend_may_know_is_left_to_it(format: Any, reason: str) -> None:
    refused = LLGuidance.refusal(GrammarSpec("structural_tag", json.dumps({"format": format})))
    assert refused is not None and reason in refused


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ({"type": "or", "elements": [{"type": "regex"}]}, "format.elements[0]: regex needs"),
        ({**TAGS, "triggers": ["<g"]}, "format.tags[0].begin: must start with exactly one"),
        ({**TAGS, "tags": []}, "must not be empty"),
        ({"type": "json_schema", "json_schema": False}, "format.json_schema"),
        ({"type": "sequence", "elements": 3}, "sequence needs"),
        ({"type": "const_string", "value": 3}, "must be a text"),
        ({"type": "tag", "begin": "a", "end": "b"}, "tag needs"),
    ],
    ids=lambda value: str(value)[:48],
)
def test_a_wrong_format_is_refused_by_its_place(
    backend: LLGuidance, format: Any, reason: str
) -> None:
    with pytest.raises(ValueError) as caught:
        backend.compile(GrammarSpec("structural_tag", json.dumps({"format": format})))
    assert reason in str(caught.value)


def test_xgrammar_refuses_what_it_would_pass_over() -> None:
    pytest.importorskip("xgrammar")
    from jackfield.plugins.grammar_backends.xgrammar import XGrammar

    def refusal(format: Any) -> str | None:
        return XGrammar.refusal(GrammarSpec("structural_tag", json.dumps({"format": format})))

    limited = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}}
    assert refusal(tag("a", NUMBER, "b")) is None
    assert refusal(tag("a", limited, "b")) is None
    assert "maxLength" in str(refusal({**TAGS, "tags": [tag("<f", limited, "b")]}))
    assert "never_first" in str(refusal(TEXT)) or "never" in str(refusal(TEXT))
    assert "excludes" in str(refusal({"type": "regex", "pattern": "a", "excludes": ["b"]}))
    called = GrammarSpec("structural_tag", json.dumps({"format": tag("<call>", NUMBER, "b")}))
    with pytest.raises(ValueError, match="special token <call>"):
        XGrammar(VOCABULARY).compile(called)
