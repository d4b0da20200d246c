"""Chains of references and rules: how long they are, and that too long ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jackfield.core.grammars import reference_depth
from jackfield.core.grammars.reference_depth import check_chains
from jackfield.core.protocols.grammars import GrammarSpec


def chain(count: int, last: Any = None) -> dict[str, Any]:
    schemas: dict[str, Any] = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)
    }
    schemas[f"a{count}"] = last or {"type": "string"}
    return {"$ref": "#/$defs/a0", "$defs": schemas}


def lark(count: int, last: str = '"a"') -> str:
    rules = "".join(f'r{i}: "x" r{i + 1} "r0: y"\n' for i in range(count))
    return f"start: r0\n{rules}r{count}: {last}\n"


NAMED_LIKE_KEYWORDS = {
    "properties": {
        "enum": {"$ref": "#/definitions/$defs"},
        "required": {"properties": {"$ref": {"$ref": "#/definitions/a~1b"}}},
    },
    "definitions": {
        "$defs": {"items": [{"$ref": "#/definitions/a~1b"}]},
        "a/b": {"prefixItems": [{"$ref": "#/definitions/$defs/items/0"}]},
        "unused": {"$ref": "#/definitions/unused"},
    },
}


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": chain(4)}


@pytest.mark.parametrize(
    ("kind", "text", "longest"),
    [
        ("json", json.dumps({"type": "object"}), 0),
        ("json", "true", 0),
        ("json", json.dumps({"$ref": "#"}), 0),
        ("json", json.dumps(chain(7)), 8),
        ("json", json.dumps(chain(7, {"$ref": "#/$defs/a3"})), 8),
        ("json", json.dumps(NAMED_LIKE_KEYWORDS), 3),
        ("json", json.dumps({"$ref": "http://elsewhere/a"}), 0),
        ("json", json.dumps({"const": {"$ref": "#/a"}}), 0),
        ("json", json.dumps({"$ref": "#/a/9999999999"}), 1),
        ("grammar", lark(7), 8),
        ("grammar", lark(7, "r3 | r0"), 8),
        ("grammar", lark(7).replace(":", "::=").replace("start", "root"), 8),
        ("grammar", '?start.2: a | b\na: "b: c" /b: c/\n// c: a\nb[lazy]: c\nc: "]"\n', 2),
        ("grammar", "nothing here", 0),
        ("structural_tag", json.dumps({"structures": [{"schema": chain(5)}]}), 6),
        ("structural_tag", json.dumps({"structures": [{"schema": chain(5)}, {"schema": True}]}), 6),
        ("structural_tag", json.dumps({"format": {"elements": [SCHEMA_FORMAT]}}), 5),
        ("regex", "r0", 0),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_longest_chain_decides(kind: Any, text: str, longest: int) -> None:
    spec = GrammarSpec(kind, text)
    check_chains(spec, longest)
    if longest:
        with pytest.raises(ValueError, match=f"{longest} times.*max_grammar_references"):
            check_chains(spec, longest - 1)


def test_a_chain_past_any_stack_is_measured() -> None:
    for spec in (
        GrammarSpec("json", json.dumps(chain(20_000))),
        GrammarSpec("grammar", lark(20_000)),
    ):
        with pytest.raises(ValueError, match="20001 times"):
            check_chains(spec, 256)


def test_a_schema_that_is_in_too_many_targets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 targets, each of which has all that follow it: 210 visits, and those of the root."""
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(19):
        inner = {"items": inner}
    targets = [{"$ref": "#/$defs/a" + "/items" * depth} for depth in range(20)]
    spec = GrammarSpec("json", json.dumps({"anyOf": targets, "$defs": {"a": inner}}))
    check_chains(spec, 2)
    monkeypatch.setattr(reference_depth, "MAX_VISITED", 200)
    with pytest.raises(ValueError, match="too many schemas"):
        check_chains(spec, 2)
