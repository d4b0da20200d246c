"""How tools become formats: what is written one by one, in order, and what no form can hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from jackfield.core.grammars.tool_calls.call_arguments import MAX_OPTIONAL, arguments_format
from jackfield.core.grammars.tool_calls.call_format import (
    CallableTool,
    calls_or_schema_tag,
    forms_of,
    optional_tag,
    required_tag,
)
from jackfield.core.protocols.parsers import ArgumentForm, CallForm

XML = ArgumentForm(begin="<p={key}>", end="</p>", plain=True, never=("</f>",))
PYTHON = ArgumentForm(begin="{key}=", between=", ", named={"true": "True", "false": "False"})
FORM = CallForm(
    trigger="<c>",
    open='<c>{"name": "',
    begin='{name}", "arguments": ',
    end="}",
    between='}</c><c>{"name": "',
    close="</c>",
)
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def texts(format: Mapping[str, Any]) -> set[str]:
    """Every text that a format without free text has, with JSON schemas as `*`."""
    match format["type"]:
        case "const_string":
            return {format["value"]}
        case "json_schema":
            return {"*"}
        case "sequence":
            prefixes = {""}
            for element in format["elements"]:
                prefixes = {a + b for a in prefixes for b in texts(element)}
            return prefixes
        case "or":
            return set().union(*map(texts, format["elements"]))
        case "optional":
            return {"", *texts(format["content"])}
        case "tag":
            return {format["begin"] + text + format["end"] for text in texts(format["content"])}
    raise AssertionError(format)


def schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


@pytest.mark.parametrize(
    ("required", "expected"),
    [
        ("ac", {"a=*, c=*", "a=*, b=*, c=*"}),
        ("b", {"b=*", "a=*, b=*", "b=*, c=*", "a=*, b=*, c=*"}),
        ("", {"", "a=*", "b=*", "c=*", "a=*, b=*", "a=*, c=*", "b=*, c=*", "a=*, b=*, c=*"}),
    ],
)
def test_arguments_come_in_order_with_separators_between_them(
    required: str, expected: set[str]
) -> None:
    tag_format = arguments_format(PYTHON, schema(list(required), a=NUMBER, b=NUMBER, c=NUMBER))
    assert texts(tag_format) == expected


def test_constants_are_written_as_the_family_writes_them() -> None:
    flags = schema(["a", "b"], a={"type": "boolean"}, b={"enum": [True, "x", 3]})
    assert texts(arguments_format(PYTHON, flags)) == {
        f"a={a}, b={b}" for a in ("True", "False") for b in ("True", '"x"', "3")
    }
    plain = schema(["a", "b"], a={"enum": ["é", 'q"']}, b={"type": ["null"]})
    assert texts(arguments_format(XML, plain)) == {
        f"<p=a>{a}</p><p=b>null</p>" for a in ("é", 'q"')
    }


def test_references_find_their_way() -> None:
    pair = {"type": "array", "items": {"$ref": "#/$defs/n"}}
    parameters = {**schema(["a"], a=pair), "$defs": {"n": NUMBER}}
    resolved = arguments_format(XML, parameters)["elements"][0]["content"]["json_schema"]
    assert resolved["items"] == {"$ref": "#/$defs/parameters/$defs/n"}
    assert resolved["$defs"]["parameters"]["$defs"]["n"] == NUMBER
    referred = {**schema(["a"], a={"$ref": "#/$defs/n"}), "$defs": {"n": {"enum": ["x"]}}}
    assert texts(arguments_format(XML, referred)) == {"<p=a>x</p>"}


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (schema(["a"], a={"type": "string", "format": "hostname"}), "a: format of a string"),
        (schema(["a"], a={"type": ["string", "integer"]}), "a: strings and other values"),
        (schema(["a"], a={"enum": ["x", 1]}), "a: strings and other values"),
        (schema(["a"], a={"enum": ["x</p>"]}), "a: 'x</p>' cannot be written"),
        (schema(["a"], a={"minimum": 3}), "a: needs a type"),
        (schema(["a"], a={**TEXT, "pattern": "^a|b$"}), "a: pattern"),
        (schema(["a b"], **{"a b": TEXT}), "'a b' is no name"),
        (
            {**schema(["a"], a={"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/a"}}},
            "a: has too many alternatives",
        ),
        (
            {
                **schema(["a"], a={"$ref": "#/$defs/a"}),
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}},
            },
            "a: has too many alternatives",
        ),
        (
            {
                **schema(
                    [],
                    **{
                        f"a{i}": {"type": "array", "items": {"$ref": "#/$defs/b"}}
                        for i in range(200)
                    },
                ),
                "$defs": {"b": {"enum": ["x" * 9000]}},
            },
            "refer to a large schema",
        ),
        (schema(["z"], a=TEXT), "required: z"),
        ({**schema([], a=TEXT), "additionalProperties": True}, "additionalProperties"),
        ({**schema([], a=TEXT), "anyOf": [{"required": ["a"]}]}, "anyOf of a whole object"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_unenforceable_schemas_are_refused_with_a_reason(
    parameters: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError) as caught:
        arguments_format(XML, parameters)
    assert reason in str(caught.value)


@pytest.mark.parametrize("last", [[], ["last"]])
def test_as_many_arguments_may_be_missing_as_the_limit_says(last: list[str]) -> None:
    def properties(count: int) -> dict[str, Any]:
        return dict.fromkeys([*(f"p{i}" for i in range(count)), *last], NUMBER)

    arguments_format(PYTHON, schema(last, **properties(MAX_OPTIONAL)))
    with pytest.raises(ValueError, match=f"more than {MAX_OPTIONAL} parameters"):
        arguments_format(PYTHON, schema(last, **properties(MAX_OPTIONAL + 1)))
    many = schema(last, **properties(MAX_OPTIONAL + 1))
    assert arguments_format(XML, many)["type"] == "sequence", "nothing stands between: no limit"


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ("date", "2026-11-30", "2026-02-30"),
        ("time", "23:59:00Z", "24:00:00Z"),
        ("date-time", "2026-11-30T08:15:00.25+02:00", "2026-11-30 08:15:00"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("email", "a.b@example.org", "a@b@c.org"),
        ("ipv4", "10.0.255.1", "10.0.256.1"),
    ],
)
def test_formats_of_plain_strings_are_expressions(format: str, right: str, wrong: str) -> None:
    tag_format = arguments_format(XML, schema(["a"], a={"type": "string", "format": format}))
    pattern = tag_format["elements"][0]["content"]["pattern"]
    assert re.fullmatch(pattern, right) and not re.fullmatch(pattern, wrong)


def test_names_are_written_as_the_form_has_them() -> None:
    tools = [CallableTool('say "hi"', {"type": "object"})]
    (call,) = required_tag([FORM], tools, parallel=False)["format"]["content"]["tags"]
    assert json.loads(call["begin"].removesuffix(', "arguments": ').join(['"', ""])) == 'say "hi"'
    bare = CallForm(
        trigger="<c>", open="<c>", begin="{name}:{number}|", end="", between="", quoted=False
    )
    with pytest.raises(ValueError, match="no name"):
        required_tag([bare], tools, parallel=True)
    (call,) = required_tag([bare], [CallableTool("f", {})], parallel=True)["format"]["content"][
        "tags"
    ]
    assert call["begin"] == "f:" and call["content"]["elements"][0]["type"] == "regex"


def test_only_strict_tools_are_constrained() -> None:
    tools = [CallableTool("f", {"type": "object", "properties": {"a": TEXT}}, strict=False)]
    (call,) = required_tag([FORM], tools, parallel=True)["format"]["content"]["tags"]
    assert call["content"]["json_schema"] == {"type": "object"}
    tag_format = optional_tag([FORM], tools, parallel=False)["format"]
    assert tag_format["triggers"] == ["<c>"] and tag_format["stop_after_first"]
    assert tag_format["tags"][0]["content"]["stop_after_first"]
    either = calls_or_schema_tag([FORM], tools, NUMBER, parallel=True)["format"]["elements"]
    assert [item["type"] for item in either] == ["tag", "json_schema"]


def test_a_parser_has_one_form_or_more_or_none() -> None:
    class One:
        call_form = FORM

    class Two:
        call_form = (FORM, FORM)

    assert forms_of(One) == (FORM,) and forms_of(Two) == (FORM, FORM)
    assert forms_of(None) == forms_of(object) == ()
