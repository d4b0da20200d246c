"""The bounds on grammars, and which of them compile at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jackfield import SamplingParams, StructuredOutputsParams
from jackfield.core.config import EngineConfig, StructuredOutputsConfig
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.grammars.schemas.cost import is_plain, is_tiny
from jackfield.core.grammars.schemas.keywords import subschemas
from jackfield.core.grammars.spec import begins_free, closed, grammar_spec
from jackfield.core.protocols.grammars import GrammarSpec

CONFIG = StructuredOutputsConfig(max_grammar_bytes=2000, max_grammar_depth=10)
PLAIN = {"type": "object", "properties": {"a": {"enum": ["x", {"pattern": "data"}]}}}


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ({"json": '{ "b": 1,\n "a": 2}'}, "json", '{"b":1,"a":2}'),
        ({"json": {"b": 1, "a": [True]}}, "json", '{"b":1,"a":[true]}'),
        ({"json": True}, "json", "true"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["é", "b"]}, "choice", '["é","b"]'),
        ({"grammar": "start: A"}, "grammar", "start: A"),
        ({"json_object": True}, "json_object", ""),
        ({"structural_tag": {"triggers": ["<"]}}, "structural_tag", '{"triggers":["<"]}'),
    ],
)
def test_equal_constraints_have_one_form(value: Any, kind: str, text: str) -> None:
    spec = grammar_spec(StructuredOutputsParams(**value), CONFIG)
    assert (spec.kind, spec.text) == (kind, text)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"json": 5}, "structured_outputs.json"),
    ],
)
def test_wrong_constraints_are_named(value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(**value)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"json": "{not json"}, "JSON"),
        ({"json": "[1]"}, "object"),
        ({"structural_tag": "3"}, "object"),
        ({"json": nested(40)}, "max_grammar_depth"),
        ({"json": "[" * 900 + "]" * 900}, "JSON"),
        ({"regex": "(" * 40 + "a" + ")" * 40}, "max_grammar_depth"),
        ({"json": {"]]": nested(40)}}, "max_grammar_depth"),
        ({"json": {"properties": {"]}": {"properties": {"]}": nested(9)}}}}}, "max_grammar_depth"),
        ({"json": {"pattern": "(" * 40}}, "max_grammar_depth"),
        ({"regex": "([)]" * 40 + "a" + ")" * 40}, "max_grammar_depth"),
        ({"grammar": "start: " + '(")" ' * 40 + ")" * 40}, "max_grammar_depth"),
        ({"regex": "a" * 2001}, "max_grammar_bytes"),
        ({"json": {"enum": ["é" * 999, "b"]}}, "max_grammar_bytes"),
        ({"choice": ["\ud800"]}, "JSON"),
    ],
)
def test_hostile_grammars_are_refused_by_field(value: Any, word: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_spec(StructuredOutputsParams(**value), CONFIG)
    (kind,) = value
    assert caught.value.param == f"structured_outputs.{kind}" and word in caught.value.message


def test_brackets_in_a_character_class_do_not_nest_whatever_is_before_them() -> None:
    for text in ("[" + "(" * 40 + "]", "[\n" + "(" * 40 + "]", r"[\]" + "(" * 40 + "]"):
        assert grammar_spec(StructuredOutputsParams(regex=text), CONFIG).text == text


def test_a_schema_nested_past_any_stack_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_grammar_depth"):
        grammar_spec(StructuredOutputsParams(json=nested(100_000)), CONFIG)


def test_what_the_caller_gave_is_left_alone() -> None:
    schema = {"properties": {"a": {}}}
    spec = grammar_spec(StructuredOutputsParams(json=schema), CONFIG)
    assert "additionalProperties" in spec.text and schema == {"properties": {"a": {}}}


def test_a_dict_becomes_params() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    with pytest.raises(InvalidRequest, match="regexp"):
        SamplingParams(structured_outputs={"regexp": "a"})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        SamplingParams(structured_outputs="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        (PLAIN, True),
        ({"type": "array", "maxItems": 50}, True),
        ({"type": "object", "properties": {"pattern": {"type": "string"}}}, True),
        ({"type": "string", "maxLength": 9}, False),
        ({"type": "array", "maxItems": 10**6}, False),
        ({"type": "array", "maxItems": "9"}, False),
        ({"items": {"type": "string", "pattern": "a+"}}, False),
        ({"properties": {f"k{i}": {"type": "string"} for i in range(41)}}, False),
        ({"enum": list(range(600))}, False),
        ({"const": "x" * 20_000}, False),
        ({"type": "integer", "minimum": -4, "exclusiveMaximum": 1000}, True),
        ({"type": "number", "minimum": 1e300}, False),
        ({"type": "integer", "const": -1e19}, False),
        ({"enum": ["a", {"b": [10**30]}]}, False),
        ({"type": "integer", "const": 10**15}, True),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {}}}, True),
        ({"type": "object", "anyOf": [{}, {}]}, False),
        ({"$ref": "#/$defs/a", "minItems": 3, "$defs": {"a": {}}}, False),
        ({"if": {}, "then": {}}, False),
        ({"unheard-of": 1}, False),
    ],
)
def test_only_ordinary_schemas_are_plain(schema: Any, plain: bool) -> None:
    assert is_plain(GrammarSpec("json", json.dumps(schema))) is plain


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({"properties": {"a": {}}}, False),
        ({"type": "array", "items": {"properties": {"a": {}}}}, False),
        ({"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]}, False),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, True),
        ({"properties": {"a": {}}, "patternProperties": {"b": {}}}, True),
        ({"type": "object"}, True),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, True),
        ({"properties": {"a": {}}, "$ref": "#/$defs/more"}, True),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, True),
        ({"const": {"properties": {}}}, True),
    ],
)
def test_objects_that_name_their_properties_are_closed(schema: Any, same: bool) -> None:
    value = closed(json.loads(json.dumps(schema)))
    assert (value == schema) is same
    assert same or '"additionalProperties": false' in json.dumps(value)


def test_expressions_and_grammars_are_never_plain() -> None:
    assert not is_plain(GrammarSpec("regex", "a"))
    assert not is_plain(GrammarSpec("grammar", "start: A"))
    assert is_plain(GrammarSpec("choice", '["a"]')) and is_plain(GrammarSpec("json_object"))


@pytest.mark.parametrize(
    ("spec", "tiny"),
    [
        (GrammarSpec("regex", "[0-9]{3}-[0-9]{4}"), True),
        (GrammarSpec("regex", "((a{1,99}){1,99}){1,99}"), False),
        (GrammarSpec("regex", "a" * 300), False),
        (GrammarSpec("grammar", 'start: "a" | start "b"'), True),
        (GrammarSpec("json", '{"type":"string","maxLength":40}'), True),
        (GrammarSpec("json", '{"type":"string","maxLength":40000}'), False),
        (GrammarSpec("json", '{"type":"integer","const":-1e19}'), False),
        (GrammarSpec("json", '{"allOf":[{"type":"integer"},{"const":-1E19}]}'), False),
    ],
)
def test_only_short_texts_that_repeat_little_are_tiny(spec: GrammarSpec, tiny: bool) -> None:
    assert is_tiny(spec) is tiny


def test_subschemas_leave_data_alone() -> None:
    schema = {
        "anyOf": [{"const": {"not": 1}}, {"$ref": "#/$defs/a"}],
        "$defs": {"a": {"items": {"enum": [{"if": 1}]}}},
    }
    actual = {key for part in subschemas(schema) for key in part}
    assert actual == {"anyOf", "const", "$ref", "$defs", "items", "enum"}


def test_the_configuration_names_a_wrong_field() -> None:
    engine_config = EngineConfig(structured_outputs_config={"backend": "xgrammar"})  # type: ignore[arg-type]
    assert engine_config.structured_outputs_config.backend == "xgrammar"
    for wrong in ({"compile_timeout": 0}, {"backends": "x"}, 3):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(structured_outputs_config=wrong)  # type: ignore[arg-type]
        assert caught.value.param == "structured_outputs_config"


@pytest.mark.parametrize(
    ("tag", "free"),
    [
        ({"structures": [], "triggers": []}, True),
        ({"structures": [], "triggers": [], "at_least_one": True}, False),
        ({"format": {"type": "triggered_tags"}}, True),
        ({"format": {"type": "triggered_tags", "at_least_one": True}}, False),
        ({"format": {"type": "or", "elements": [{"type": "tag"}, {"type": "any_text"}]}}, True),
        ({"format": {"type": "or", "elements": [{"type": "tag"}, 3]}}, False),
        ({"format": {"type": "tag", "content": {"type": "any_text"}}}, False),
        ({"format": 3}, False),
    ],
)
def test_some_tags_let_an_output_begin_with_any_text(tag: Any, free: bool) -> None:
    assert begins_free(GrammarSpec("structural_tag", json.dumps(tag))) is free
    assert not begins_free(GrammarSpec("json", json.dumps(tag)))
