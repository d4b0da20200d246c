"""Values of arguments: Python literals against Python's own, plain text against its schema."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.output_parsing.output_parser import (
    OutputParser,
    ParsedMessage,
    ParsedToolCall,
    fold,
)
from jackfield.plugins.conformance.parsers import cut, run
from jackfield.plugins.parsing.python_values import python_value
from jackfield.plugins.parsing.schema_values import json_of, parameter_types
from jackfield.plugins.reasoning.harmony import HarmonyReasoning
from jackfield.plugins.tools.harmony import HarmonyToolParser
from jackfield.plugins.tools.python_families import PythonicToolParser

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=()), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def as_json(value: Any) -> Any:
    """What a Python value becomes on its way through JSON."""
    return json.loads(json.dumps(value))


@settings(max_examples=200, deadline=None)
@given(value=VALUES, places=st.lists(st.integers(0, 60), max_size=5))
def test_what_python_writes_is_read_as_python_reads_it(value: Any, places: list[int]) -> None:
    text = f"[f(a={value!r})]"
    (call,) = fold(run(PythonicToolParser(), cut(text, places))).tool_calls
    assert json.loads(call.arguments) == {"a": as_json(value)}


SOURCES = st.lists(
    st.sampled_from(
        [*"[](){},:'\" \n\\", "1", "-2.5e3", "0x1f", "1_0", ".5", "True", "None", "nan", "inf", "x"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=500, deadline=None)
@given(text=SOURCES)
def test_what_python_cannot_read_is_no_value(text: str) -> None:
    value = python_value(text)
    if value is None:
        return
    try:
        expected = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        # More is let through than Python does: JSON's names, strings over several lines, a
        # parenthesis around one value.
        json.loads(value)
        return
    if "(" not in text:  # Where it may be a tuple, or may not.
        assert json.loads(value) == as_json(expected)


TYPED = [
    ("Paris", {"type": "string"}, "Paris"),
    ("12", {"type": "string"}, "12"),
    ("12", {"type": "integer"}, 12),
    ("+007", {"type": "integer"}, 7),
    ("1.5", {"type": "integer"}, 1.5),
    (" -2.5e3 ", {"type": "number"}, -2500.0),
    ("TRUE", {"type": "boolean"}, True),
    ("yes", {"type": "boolean"}, "yes"),
    ("None", {"type": ["array", "null"]}, None),
    ("null", {"type": "string"}, "null"),
    ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    ('{"a": [1, "}"]}', {"type": "object"}, {"a": [1, "}"]}),
    ("{'a': (1, None)}", {"type": "object"}, {"a": [1, None]}),
    ('{"a": "line\nbreak"}', {"type": "object"}, {"a": "line\nbreak"}),
    ("[1, 2", {"type": "array"}, "[1, 2"),
    ("3", {"enum": [1, 2, 3]}, 3),
    ("a", {"enum": ["a", "b"]}, "a"),
    ("5", {"$ref": "#/$defs/Loop"}, 5),
    ("5", {"$ref": "#/$defs/Size"}, 5),
    ("[5]", {"items": {"type": "integer"}}, [5]),
    ("5", {"type": "strange"}, 5),
    ("five", {}, "five"),
]
DEFINITIONS = {"Loop": {"$ref": "#/$defs/Loop"}, "Size": {"oneOf": [{"type": "integer"}]}}


@pytest.mark.parametrize(("text", "schema", "value"), TYPED)
def test_text_is_typed_by_its_schema(text: str, schema: Any, value: Any) -> None:
    types = parameter_types({"properties": {"x": schema}, "$defs": DEFINITIONS}, "x")
    typed = json.loads(json_of(text, types))
    assert typed == value and type(typed) is type(value)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20), types=st.sets(st.sampled_from(["string", "integer", "object"])))
def test_any_text_becomes_json(text: str, types: set[str]) -> None:
    json.loads(json_of(text, frozenset(types)))


def test_harmony_comes_apart_through_the_chain() -> None:
    text = (
        "<|channel|>analysis<|message|>They want weather.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I check.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
    )
    expected = ParsedMessage(
        "I check.", "They want weather.", [ParsedToolCall("get_weather", '{"city": "Paris"}')]
    )
    for pieces in ([text], list(text)):
        assert fold(run(OutputParser(HarmonyReasoning(), HarmonyToolParser()), pieces)) == expected


@pytest.mark.parametrize("start", [" to=functions.f", "to=functions.f ", " to=functions.f "])
def test_a_call_of_harmony_may_begin_with_its_recipient(start: str) -> None:
    """As the chat template of gpt-oss writes earlier calls, of which a prompt ends with
    `<|start|>assistant`."""
    text = start + '<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    expected = ParsedMessage(None, None, [ParsedToolCall("f", '{"a": 1}')])
    for pieces in ([text], list(text)):
        assert fold(run(OutputParser(HarmonyReasoning(), HarmonyToolParser()), pieces)) == expected
        assert fold(run(OutputParser(None, HarmonyToolParser()), pieces)) == expected


def test_text_without_messages_of_harmony_is_shown_as_it_comes() -> None:
    parser = OutputParser(HarmonyReasoning(), HarmonyToolParser())
    assert fold(parser.feed(" told you")).content == " told you"
    assert fold([*parser.feed(""), *parser.finish()]).content in (None, "")
