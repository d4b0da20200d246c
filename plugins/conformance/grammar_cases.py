"""Cases of the kit of grammar backends: a vocabulary, enumerated languages, schemas."""

from __future__ import annotations

import functools
from typing import Any

from ...core.protocols.grammars import GrammarSpec, Vocabulary

PIECES = (
    " the", "true", "false", "null", '{"', '":', '": ', '", "', '"}', ", ", "[1", "ab", "abc", "bc",
    "cab", "é", "日本", "  ", "\n\n", "12", "-1", "0.", "yes", "no", "none", "ye", '"a', 'b"',
    "<a>", "</", "a-", "-bc", "99", '"name', '"x": ',
)  # fmt: skip
"""Tokens of more than one byte."""
CUT = (b"\xe6\x97", b"\xa5\xe6", b"\xc3")
"""Tokens that begin or end inside a character."""
FIRST_EOS = 256 + len(PIECES) + len(CUT)
SIZE = FIRST_EOS + 21
"""Not a multiple of 32; ids after those of the special tokens have no token."""

LANGUAGES: list[tuple[GrammarSpec, tuple[str, ...]]] = [
    (GrammarSpec("choice", '["yes","no","none","né"]'), ("yes", "no", "none", "né")),
    (GrammarSpec("choice", '["a","ab","abc"]'), ("a", "ab", "abc")),
    (GrammarSpec("choice", '["\\"}\\\\","日本"]'), ('"}\\', "日本")),
    (GrammarSpec("regex", "(ab|c){1,2}"), ("ab", "c", "abab", "abc", "cab", "cc")),
    (GrammarSpec("regex", "é?日[01]"), ("日0", "日1", "é日0", "é日1")),
    (GrammarSpec("regex", "a{2,3}"), ("aa", "aaa")),
    (GrammarSpec("json", '{"enum":[1,12,"ab",null,true]}'), ("1", "12", '"ab"', "null", "true")),
    (
        GrammarSpec("json", '{"type":"array","items":{"type":"boolean"},"maxItems":1}'),
        ("[]", "[true]", "[false]"),
    ),
    (
        GrammarSpec(
            "json",
            '{"type":"object","properties":{"x":{"enum":[0,1]},"y":{"const":"é"}},'
            '"required":["x"],"additionalProperties":false}',
        ),
        ('{"x": 0}', '{"x": 1}', '{"x": 0, "y": "é"}', '{"x": 1, "y": "é"}'),
    ),
    (GrammarSpec("grammar", 'start: x "-" x\nx: "a" | "bc"\n'), ("a-a", "a-bc", "bc-a", "bc-bc")),
    (
        GrammarSpec("grammar", 'root ::= x "-" x\nx ::= "a" | "bc"\n'),
        ("a-a", "a-bc", "bc-a", "bc-bc"),
    ),
    (
        GrammarSpec(
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"sequence","elements":['
            '{"type":"const_string","value":"<a>"},{"type":"or","elements":['
            '{"type":"const_string","value":"no"},{"type":"json_schema","json_schema":'
            '{"enum":[12]}}]},{"type":"const_string","value":"</"}]}}',
        ),
        ("<a>no</", "<a>12</"),
    ),
]
"""Grammars, and all outputs that each allows if JSON is compact."""

HELD: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ({"type": "integer"}, ("0", "-12"), ("1.5", '"1"', "true")),
    ({"type": "number"}, ("0.5", "-1"), ('"1"', "null")),
    ({"type": "string"}, ('"a\\n"', '""'), ("a", '"a\nb"', '"\\x"')),
    ({"type": "object"}, ("{}", '{"a": [1, {}]}'), ("[]", "1", "{'a': 1}")),
    ({"type": ["string", "null"]}, ("null", '"a"'), ("1",)),
    ({"type": "integer", "minimum": 3, "maximum": 12}, ("3", "12"), ("2", "13", "-5", "120")),
    ({"type": "integer", "exclusiveMinimum": 3}, ("4",), ("3",)),
    ({"type": "number", "exclusiveMaximum": 0}, ("-1",), ("0", "1")),
    ({"type": "integer", "multipleOf": 5}, ("10",), ("12",)),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ('"ab"', '"日本語"'), ('"a"', '"abcd"')),
    ({"type": "string", "pattern": "^a+$"}, ('"aa"',), ('"ab"', '""')),
    ({"type": "string", "pattern": "b"}, ('"abc"',), ('"ac"',)),
    ({"type": "string", "format": "date"}, ('"2024-02-29"',), ('"2024-13-01"', '"today"')),
    ({"type": "string", "format": "uuid"}, ('"123e4567-e89b-12d3-a456-426614174000"',), ('"1"',)),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
     ("[null]", "[null, null]"), ("[]", "[null, null, null]", "[1]")),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ("[1]",), ("[2]", "[1, 1]")),
    ({"type": "array", "uniqueItems": True}, ("[1, 2]",), ("[1, 1]",)),
    ({"type": "array", "contains": {"const": 1}}, ("[1]",), ("[2]",)),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
     ('{"a": null}',), ("{}", '{"a": 1}')),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False},
     ("{}", '{"a": 1}'), ('{"b": 1}',)),
    ({"type": "object", "additionalProperties": {"type": "integer"}},
     ('{"b": 1}',), ('{"b": ""}',)),
    ({"type": "object", "patternProperties": {"^a": {"const": 1}}, "additionalProperties": False},
     ('{"ab": 1}',), ('{"ab": 2}', '{"b": 1}')),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, ('{"ab": 1}',), ('{"b": 1}',)),
    ({"type": "object", "minProperties": 1, "additionalProperties": {"const": 1}},
     ('{"a": 1}',), ("{}",)),
    ({"type": "object", "maxProperties": 1, "additionalProperties": {"const": 1}},
     ('{"a": 1}',), ('{"a": 1, "b": 1}',)),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ('{"b": 1}',), ('{"a": 1}',)),
    ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, ("null", "1"), ('"a"',)),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ("3",), ("2", "null")),
    ({"not": {"type": "string"}}, ("1",), ('"a"',)),
    ({"if": {"type": "string"}, "then": {"maxLength": 1}}, ('"a"', "1"), ('"ab"',)),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 7}}}, ("7",), ("8",)),
    ({"type": "array", "items": {"$ref": "#"}}, ("[[], [[]]]",), ("[1]", "[[]")),
    ({"const": ["a"]}, ('["a"]',), ('["b"]', "[]")),
    (True, ("1", '"a"', "[{}]"), ("a", "[1")),  # type: ignore[list-item]
]  # fmt: skip
"""Schemas, with valid and invalid texts. Invalid: not JSON, or not matching the schema."""

WRONG = [
    GrammarSpec("json", '{"type":"heap"}'),
    GrammarSpec("regex", "(unclosed"),
    GrammarSpec("grammar", "start: missing_rule\n"),
    GrammarSpec("grammar", "root ::= missing_rule\n"),
    GrammarSpec("structural_tag", '{"structures":[],"triggers":[]}'),
]
ODD = [
    GrammarSpec("json", "3"), GrammarSpec("json", '{"$ref":3,"type":{},"properties":[1]}'),
    GrammarSpec("json", '{"items":[{"format":[]}],"enum":{}}'), GrammarSpec("regex", "[z-a]\\"),
    GrammarSpec("grammar", "::="), GrammarSpec("grammar", "\ud7ff:\n"),
    GrammarSpec("structural_tag", '{"format":{"type":"unheard-of"}}'),
    GrammarSpec("structural_tag", '{"format":[]}'), GrammarSpec("structural_tag", "{}"),
    GrammarSpec("choice", '[""]'),
]  # fmt: skip
"""Schemas that requests may contain: they must be refused or enforced, without other failures."""

WALKED = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["ab", 12, None]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@functools.cache
def vocabulary(*, compact: bool = True) -> Vocabulary:
    """Return a vocabulary of every byte, words of some bytes, two end tokens, a special token, and
    ids without a token."""
    written = [bytes([byte]) for byte in range(256)]
    written += [piece.encode() for piece in PIECES] + list(CUT)
    ids = {text: token_id for token_id, text in reversed(list(enumerate(written)))}
    written += [b""] * (SIZE - len(written))

    def encode(text: str) -> list[int]:
        rest, tokens = text.encode(), []
        while rest:
            length = next(n for n in range(min(8, len(rest)), 0, -1) if rest[:n] in ids)
            tokens.append(ids[rest[:length]])
            rest = rest[length:]
        return tokens

    return Vocabulary(
        token_bytes=written,
        size=SIZE,
        eos_token_ids=(FIRST_EOS, FIRST_EOS + 1),
        encode=encode,
        compact_json=compact,
        special_tokens={"<|call|>": FIRST_EOS + 2},
    )
