"""Measures the longest chain of references in a schema, or of rules in a grammar."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..protocols.grammars import GrammarSpec
from .schemas.keywords import DATA, NAMED
from .schemas.quoting import GBNF_QUOTES, LARK_QUOTES, split_quoted
from .spec import tag_schemas

MAX_VISITED = 500_000
"""Most schema values visited, repeated targets included."""

_DEFINITIONS = frozenset(("$defs", "definitions"))
_COMMENT = re.compile(r"^[ \t]*+(?://|#)[^\n]*+", re.MULTILINE)
_LARK_RULE = re.compile(r"^[ \t]*+[?!]?(\w++)[^:|\n]*+:", re.MULTILINE)
_GBNF_RULE = re.compile(r"^[ \t]*+([\w-]++)[ \t]*+::=", re.MULTILINE)


def check_chains(spec: GrammarSpec, limit: int) -> None:
    """Raise ValueError for a chain longer than `limit`."""
    match spec.kind:
        case "json":
            longest = _schema_chain(json.loads(spec.text))
        case "structural_tag":
            longest = max(map(_schema_chain, tag_schemas(json.loads(spec.text))), default=0)
        case "grammar":
            longest = _rule_chain(spec.text)
        case _:
            return
    if longest > limit:
        what = "rules" if spec.kind == "grammar" else "references ($ref)"
        raise ValueError(
            f"its {what} lead from one to the next {longest} times, at most {limit} are allowed "
            "(max_grammar_references)"
        )


def _chain(start: str, next_names: Callable[[str], Iterable[str]]) -> int:
    """Return the depth of a search that enters each name once, as compilers do."""
    entered = {start}
    path = [iter(next_names(start))]
    deepest = 0
    while path:
        name = next(path[-1], None)
        if name is None:
            path.pop()
        elif name not in entered:
            entered.add(name)
            path.append(iter(next_names(name)))
            deepest = max(deepest, len(path) - 1)
    return deepest


# ---------------------------------------------------------------- JSON schemas


def _schema_chain(schema: Any) -> int:
    """Return the longest chain of references within the document."""
    visited = 0

    def references(pointer: str) -> list[str]:
        nonlocal visited
        targets: list[str] = []
        pending = [_target(schema, pointer)]
        while pending:
            part = pending.pop()
            visited += 1
            if visited > MAX_VISITED:
                raise ValueError("its references ($ref) lead through too many schemas")
            if isinstance(part, list):
                pending.extend(reversed(part))
            elif isinstance(part, dict):
                reference = part.get("$ref")
                if isinstance(reference, str) and reference.startswith("#"):
                    targets.append(reference)
                pending.extend(_subschemas(part))
        return targets

    return _chain("#", references)


def _subschemas(part: dict[str, Any]) -> Iterator[Any]:
    for key, value in reversed(part.items()):
        if key in _DEFINITIONS or key in DATA:
            continue
        if key in NAMED and isinstance(value, dict):
            yield from reversed(value.values())
        elif isinstance(value, dict | list):
            yield value


def _target(schema: Any, pointer: str) -> Any:
    """Return the target of `#/$defs/name`, or None."""
    part = schema
    for key in pointer[1:].split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isascii() and key.isdigit() and len(key) < 7:
            part = part[int(key)] if int(key) < len(part) else None
        else:
            return None
    return part


# ---------------------------------------------------------------- rules


def _rule_chain(text: str) -> int:
    gbnf = "::=" in text
    quotes = GBNF_QUOTES if gbnf else LARK_QUOTES
    bare, _ = split_quoted(_COMMENT.sub("", text), quotes, lines=True)
    rule = _GBNF_RULE if gbnf else _LARK_RULE
    heads = list(rule.finditer(bare))
    bodies: dict[str, str] = {}
    for head, following in itertools.zip_longest(heads, heads[1:]):
        end = len(bare) if following is None else following.start()
        bodies[head[1]] = bodies.get(head[1], "") + bare[head.end() : end]

    def names(rule_name: str) -> list[str]:
        return [name for name in re.findall(r"[\w-]+", bodies[rule_name]) if name in bodies]

    start = "root" if gbnf else "start"
    return _chain(start, names) if start in bodies else 0
