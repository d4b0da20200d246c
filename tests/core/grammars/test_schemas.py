"""What becomes of keywords that grammars do not know: dropped, said otherwise, refused, logged."""

from __future__ import annotations

import itertools
import json
import logging
import re
from typing import Any

import pytest

from jackfield import StructuredOutputsParams
from jackfield.core.config import StructuredOutputsConfig
from jackfield.core.errors import InvalidRequest
from jackfield.core.grammars.schemas import json_schemas as schemas
from jackfield.core.grammars.schemas.json_schemas import adapted
from jackfield.core.grammars.schemas.patterns import matches_among, weakened
from jackfield.core.grammars.spec import grammar_spec

CONFIG = StructuredOutputsConfig()
INTEGER = {"type": "integer"}
OPEN = {"type": "object", "additionalProperties": INTEGER}


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({**OPEN, "propertyNames": {"type": "string"}}, OPEN),
        ({**OPEN, "propertyNames": {}}, OPEN),
        ({**OPEN, "propertyNames": True}, OPEN),
        ({**OPEN, "propertyNames": {"type": "string", "description": "a name"}}, OPEN),
        ({"items": {"type": "array", "uniqueItems": False}}, {"items": {"type": "array"}}),
        ({"type": "string", "minLength": 0}, {"type": "string"}),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"type": ["number", "null"], "format": "x"}, {"type": ["number", "null"]}),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_constraints_that_constrain_nothing_are_dropped(
    schema: Any, same: Any, strict: bool
) -> None:
    assert adapted(schema, strict=strict) == (same, [])


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        (
            {**OPEN, "propertyNames": {"enum": ["a", "b"]}, "required": ["b"]},
            {
                "type": "object",
                "additionalProperties": False,
                "required": ["b"],
                "properties": {"a": INTEGER, "b": INTEGER},
            },
        ),
        (
            {"propertyNames": {"const": "a"}, "properties": {"a": {"const": 1}, "b": {}}},
            {"properties": {"a": {"const": 1}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "^x"}},
            {"patternProperties": {"^x": True}, "additionalProperties": False},
        ),
        (
            {**OPEN, "propertyNames": {"type": "string", "maxLength": 3}},
            {
                "type": "object",
                "additionalProperties": False,
                "patternProperties": {r"^(.|\n){0,3}$": INTEGER},
            },
        ),
        (
            {"additionalProperties": False, "propertyNames": {"pattern": "^x"}},
            {"additionalProperties": False},
        ),
        ({"propertyNames": False}, {"properties": {}, "additionalProperties": False}),
    ],
)
def test_names_of_properties_become_properties(schema: Any, same: Any) -> None:
    assert adapted(schema, strict=True) == (same, [])


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"propertyNames": {"format": "email"}}, "propertyNames: format"),
        ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames: maxLength"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "beside properties"),
        ({"propertyNames": {"enum": ["a"]}, "patternProperties": {}}, "patternProperties"),
        ({"propertyNames": {"type": "integer"}}, "type must be string"),
        ({"propertyNames": {"maxLength": "3"}}, "propertyNames: maxLength"),
        ({"propertyNames": {"enum": "a"}}, "list"),
        ({"propertyNames": 3}, "schema"),
        (
            {
                "propertyNames": {"enum": [str(i) for i in range(1000)]},
                "additionalProperties": {"const": "x" * 1000},
            },
            "too many names",
        ),
    ],
)
def test_unenforceable_property_names_are_refused_by_keyword(schema: Any, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as caught:
        grammar_spec(StructuredOutputsParams(json=schema), CONFIG)
    assert caught.value.param == "structured_outputs.json"


def test_names_that_are_listed_inside_each_other_are_bounded() -> None:
    def listed(levels: int) -> Any:
        schema: Any = INTEGER
        for _ in range(levels):
            schema = {"propertyNames": {"enum": ["a", "b", "c"]}, "additionalProperties": schema}
        return schema

    result, _ = adapted(listed(3), strict=True)
    assert result["properties"]["b"]["properties"]["c"]["properties"]["a"] == INTEGER
    with pytest.raises(ValueError, match="too many names"):
        adapted(listed(40), strict=True)


FORMATS = ("path", "binary", "password", "base64", "byte", "uri-reference", "regex", "cidrv4")
UNHELD: list[tuple[Any, Any, str]] = [
    *(({"type": "string", "format": one}, {"type": "string"}, f"'{one}'") for one in FORMATS),
    ({"type": "array", "uniqueItems": True}, {"type": "array"}, "uniqueItems"),
    (
        {"anyOf": [{"type": "string", "format": "cidrv4", "pattern": "a"}, {"type": "null"}]},
        {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "null"}]},
        "'cidrv4'",
    ),
    (
        {"type": "string", "format": "email", "pattern": "^(?!\\.)a"},
        {"type": "string", "format": "email"},
        "pattern.*'email'",
    ),
]


UNHELD += [
    ({"type": "string", "pattern": pattern}, {"type": "string", "pattern": weaker}, word)
    for pattern, weaker, word in (
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?0*\d*\.?\d*$", "looks around"),
        (r"^(?=.*[A-Z])(?=.*\d).{8,}$", "^.{8,}$", "looks around"),
        (r"(?<!a)b(?<=c)*d", "bd", "looks around"),
        (r"^(?:(?!ab).)*$", "^(?:.)*$", "looks around"),
        (r"\bfoo\B", "foo", "word boundary"),
        (r"^(['\"])x\1$", r"^(['\"])x(?:(['\"]))?$", "refers back"),
        (r"^(?<q>a|b)-\k<q>$", r"^(a|b)-(?:(a|b))?$", "refers back"),
        (r"^(?P<q>a|b)-(?P=q)$", r"^(a|b)-(?:(a|b))?$", "refers back"),
        (r"^(?>a+)b$", "^(?:a+)b$", "group"),
        (r"a$b", "ab", "middle"),
    )
]
UNHELD.append(
    (
        {"type": "object", "patternProperties": {"^(?!x)[a-z]+$": {"type": "null"}}},
        {"type": "object", "patternProperties": {"^[a-z]+$": {"type": "null"}}},
        "looks around",
    )
)


@pytest.mark.parametrize(("schema", "same", "word"), UNHELD, ids=lambda value: str(value)[:40])
def test_unenforceable_keywords_are_unchecked_and_logged_or_refused_if_strict(
    schema: Any,
    same: Any,
    word: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schemas, "_logged", set())
    with caplog.at_level(logging.INFO, logger="jackfield.structured"):
        for _ in range(3):
            spec = grammar_spec(StructuredOutputsParams(json=schema), CONFIG)
    assert json.loads(spec.text) == same
    (line,) = caplog.messages
    assert "is not checked" in line
    with pytest.raises(InvalidRequest, match=word) as caught:
        grammar_spec(StructuredOutputsParams(json=schema, strict=True), CONFIG)
    assert caught.value.param == "structured_outputs.json"


def test_a_refusal_names_the_pattern_and_its_path() -> None:
    place = {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^(?!x)a"}]}
    schema = {"properties": {"a": {"items": place}}}
    with pytest.raises(InvalidRequest) as caught:
        grammar_spec(StructuredOutputsParams(json=schema, strict=True), CONFIG)
    assert "properties.a.items.anyOf[1].pattern" in caught.value.message
    assert "'^(?!x)a'" in caught.value.message


@pytest.mark.parametrize(
    "pattern",
    [
        "^a|b$",
        r"(^|,)a(,|$)",
        "^^a$$",
        r"\\b",
        r"[\b(?=]x",
        "(?i)^a$",
        "^(?:ab)+?$",
        "(",
        "a)",
        "*",
        "",
    ],
)
def test_patterns_that_grammars_can_enforce_or_that_are_wrong_stay(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert adapted(dict(schema), strict=True) == (schema, [])


LOOKING = [
    r"^(?!admin)\w{1,5}$", r"(?=a)\w+", r"\b\w", r"^(a|b?)(c)\2\1$", r"(?<=a)b+|c\B",
    r"^(?P<x>a)?(?P=x)$", r"^(a(?!b)|b)*$", r"(?>a*)b", r"^(a)?(?(1)b|c)$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", LOOKING)
def test_whatever_a_pattern_matches_its_weaker_form_matches(pattern: str) -> None:
    weaker, reason = weakened(pattern)
    texts = ["".join(letters) for n in range(6) for letters in itertools.product("abc", repeat=n)]
    matched = [text for text in texts if re.search(pattern, text)]
    assert reason is not None and matched
    assert all(re.search(weaker, text) for text in matched)


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        ("^s$", {"s"}), ("^(s|t)$", {"s", "t"}), ("^[s-t]$", {"s", "t"}), ("^s$|^t$", {"s", "t"}),
        ("^(?:s|(?<n>t))$", {"s", "t"}), ("^a?b$", {"ab", "b"}), ("^s{2}$", {"ss"}),
        ("^[b-a]$", None), (r"^a\.b$", {"a.b"}), ("s", None), ("^s", None), ("^s*$", None),
        ("^s{1,}$", None), ("^s{1,60}$", None), ("^.$", None), ("^[^s]$", None), ("^(s|u)$", None),
        (r"^\w$", None), ("^(((s{60}){60}){60}){60}$", None), ("^(s$", None), ("^s|t$", None),
    ],
)  # fmt: skip
def test_patterns_of_some_names_alone_are_found(pattern: str, same: set[str] | None) -> None:
    names = ["s", "t", "ab", "b", "ss", "a.b"]
    assert matches_among(pattern, names) == same
    assert (
        same is None
        or {name for name in names if re.search(pattern.replace("?<n", "?P<n"), name)} == same
    )


def test_patterns_that_match_declared_names_alone_join_their_schemas() -> None:
    number, low = {"type": "integer", "minimum": 0}, {"maximum": 9}
    schema, _ = adapted(
        {
            "properties": {"s": number, "t": number},
            "required": ["s", "u"],
            "patternProperties": {"^s$": INTEGER, "^[tu]$": low, "^x": INTEGER},
        },
        strict=True,
    )
    assert schema == {
        "properties": {"s": number, "t": {"allOf": [number, low]}, "u": low},
        "required": ["s", "u"],
        "patternProperties": {"^x": INTEGER},
    }
    alone = {"properties": {"s": number}, "patternProperties": {"^s$": INTEGER}}
    assert adapted(alone, strict=True)[0] == {
        "properties": {"s": number}, "additionalProperties": True
    }  # fmt: skip


def test_patterns_inside_each_other_are_bounded() -> None:
    def named(levels: int) -> Any:
        schema: Any = INTEGER
        for _ in range(levels):
            schema = {"required": ["a", "b", "c"], "patternProperties": {"^[a-c]$": schema}}
        return schema

    assert adapted(named(2), strict=True)[0]["properties"]["b"]["properties"]["c"] == INTEGER
    with pytest.raises(ValueError, match="too many names"):
        adapted(named(40), strict=True)


def test_enforced_formats_stay() -> None:
    for format in schemas.CHECKED_FORMATS:
        schema = {"type": "string", "format": format}
        assert adapted(dict(schema), strict=True) == (schema, [])


def test_schemas_in_structural_tags_are_adapted_too() -> None:
    schema = {"type": "object", "propertyNames": {"type": "string"}}
    for tag in (
        {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]},
        {"format": {"type": "json_schema", "json_schema": schema}},
    ):
        spec = grammar_spec(StructuredOutputsParams(structural_tag=tag), CONFIG)
        assert "propertyNames" not in spec.text and '{"type":"object"}' in spec.text


def test_properties_of_these_names_are_properties() -> None:
    schema = {"properties": {"propertyNames": {"type": "null"}, "uniqueItems": {}, "format": {}}}
    assert adapted(schema, strict=True) == (schema, [])
