"""Renders the templates of examples/deploy/helm: the part of Go's language that they use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ACTION = re.compile(r"(\s*)\{\{(-?)\s*(.*?)\s*(-?)\}\}(\s*)", re.S)
Nodes = list[Any]


def render(folder: Path, release: str, **changes: Any) -> dict[str, list[dict[str, Any]]]:
    """Return template → its documents; changes: of values.yaml."""
    values = yaml.safe_load((folder / "values.yaml").read_text())
    unknown = changes.keys() - values.keys()
    assert not unknown, unknown
    scope = {"Values": values | changes, "Release": {"Name": release}}
    found = {}
    for path in sorted((folder / "templates").glob("*.yaml")):
        text = "".join(_texts(_parse(iter(_lex(path.read_text())))[0], scope, scope))
        found[path.name] = [each for each in yaml.safe_load_all(text) if each is not None]
    return found


def _lex(text: str) -> Iterator[tuple[str, str]]:
    """Yield ("text", …) and ("action", …); a dash eats the space on its side."""
    position = 0
    for match in ACTION.finditer(text):
        before, left, action, right, after = match.groups()
        yield "text", text[position : match.start()] + ("" if left else before)
        yield "action", action
        position = match.end() if right else match.end() - len(after)
    yield "text", text[position:]


def _parse(tokens: Iterator[tuple[str, str]]) -> tuple[Nodes, str]:
    """Return nodes up to an `end` or `else`, and which it was."""
    nodes: Nodes = []
    for kind, value in tokens:
        word = value.split(" ")[0] if kind == "action" else ""
        if word in ("end", "else"):
            return nodes, word
        if word in ("if", "range"):
            body, last = _parse(tokens)
            other = _parse(tokens)[0] if last == "else" else []
            nodes.append((word, value.removeprefix(word).strip(), body, other))
        else:
            nodes.append((kind, value))
    return nodes, ""


def _texts(nodes: Nodes, scope: Any, dot: Any) -> Iterator[str]:
    for node in nodes:
        match node:
            case ("text", text):
                yield text
            case ("action", expression):
                yield _shown(_evaluate(expression, scope, dot))
            case ("if", condition, body, other):
                chosen = body if _evaluate(condition, scope, dot) else other
                yield from _texts(chosen, scope, dot)
            case ("range", items, body, _):
                for item in _evaluate(items, scope, dot):
                    yield from _texts(body, scope, item)


def _evaluate(expression: str, scope: Any, dot: Any) -> Any:
    first, *others = (part.split() for part in expression.split(" | "))
    value = _call(first, [], scope, dot)
    for words in others:
        value = _call(words, [value], scope, dot)
    return value


def _call(words: list[str], piped: list[Any], scope: Any, dot: Any) -> Any:
    if len(words) == 1 and not piped:
        return _value(words[0], scope, dot)
    name, *arguments = words
    given = [*(_value(word, scope, dot) for word in arguments), *piped]
    match name, given:
        case "quote", [value]:
            return json.dumps(_shown(value))
        case "not", [value]:
            return not value
        case "add", numbers:
            return sum(numbers)
        case "toYaml", [value]:
            return yaml.safe_dump(value).rstrip("\n")
        case "nindent", [width, text]:
            return "".join(f"\n{' ' * width}{line}" for line in text.splitlines())
    raise AssertionError(f"the templates use no {name} yet")


def _value(word: str, scope: Any, dot: Any) -> Any:
    if word == ".":
        return dot
    if word.startswith("."):
        value = scope
        for name in word[1:].split("."):
            value = value[name]  # KeyError: values.yaml has no such name.
        return value
    return int(word)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
