"""Grammars as an attacker writes them: chains, cycles, nests, products; drawn by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Shape = tuple[str, dict[str, Any]]
"""What it is, and the keyword arguments of a `StructuredOutputsParams`."""


class Draw(random.Random):
    """Draws, and how large the largest is."""

    scale = 1


def shapes(seed: int, count: int, scale: int = 1) -> Iterator[Shape]:
    """`count` of them; of the same seed always the same. scale: 1 is past some default limits."""
    for number in range(count):
        draw = Draw(f"{seed}/{number}")
        draw.scale = scale
        make = draw.choice(MAKERS)
        kind, value = make(draw)
        yield f"{number} {make.__name__}", {kind: value}


def _size(draw: Draw, most: int) -> int:
    """Small ones, and very large ones, equally often by their order of magnitude."""
    return int(2 ** draw.uniform(0, (most * draw.scale).bit_length()))


def _wrapper(draw: Draw) -> Callable[[Any, int], Any]:
    wrappers: list[Callable[[Any, int], Any]] = [
        lambda inner, i: inner,
        lambda inner, i: {"type": "object", "properties": {"x": inner}, "required": ["x"]},
        lambda inner, i: {"type": "object", "properties": {"x": inner, "y": inner}},
        lambda inner, i: {"type": "object", "additionalProperties": inner},
        lambda inner, i: {"type": "object", "patternProperties": {f"^k{i}$": inner}},
        lambda inner, i: {"type": "array", "items": inner},
        lambda inner, i: {"type": "array", "items": inner, "minItems": i % 7, "maxItems": 9},
        lambda inner, i: {"type": "array", "prefixItems": [inner, inner]},
        lambda inner, i: {"anyOf": [inner, {"const": i}]},
        lambda inner, i: {"anyOf": [{"const": i}, inner, inner]},
        lambda inner, i: {"oneOf": [inner, {"type": "string", "maxLength": i}]},
        lambda inner, i: {"allOf": [inner, {"description": str(i)}]},
        lambda inner, i: {**inner, "anyOf": [{"minLength": i % 5}, {"maxLength": 9}]},
        lambda inner, i: {"not": inner},
        lambda inner, i: {"if": inner, "then": inner, "else": {}},
    ]
    selection = draw.sample(wrappers, draw.choice((1, 1, 2)))
    return lambda inner, i: selection[i % len(selection)](inner, i)


def reference_chain(draw: Draw) -> tuple[str, Any]:
    wrap, count = _wrapper(draw), _size(draw, 2000)
    place = draw.choice(("$defs", "definitions"))
    schemas = {f"a{i}": wrap({"$ref": f"#/{place}/a{i + 1}"}, i) for i in range(count)}
    schemas[f"a{count}"] = {"type": "string"}
    names = list(schemas)
    if draw.random() < 0.3:
        draw.shuffle(names)
    return "json", {"$ref": f"#/{place}/a0", place: {name: schemas[name] for name in names}}


def reference_cycle(draw: Draw) -> tuple[str, Any]:
    wrap, count = _wrapper(draw), _size(draw, 2000)
    schemas = {f"a{i}": wrap({"$ref": f"#/$defs/a{(i + 1) % count}"}, i) for i in range(count)}
    return "json", json.dumps({"$ref": "#/$defs/a0", "$defs": schemas})


def reference_web(draw: Draw) -> tuple[str, Any]:
    count = _size(draw, 800)
    schemas = {}
    for i in range(count):
        wrap = _wrapper(draw)
        schemas[f"a{i}"] = wrap({"$ref": f"#/$defs/a{draw.randrange(count)}"}, i)
    return "json", {"$ref": "#/$defs/a0", "$defs": schemas}


def pointer_maze(draw: Draw) -> tuple[str, Any]:
    targets = ("#", "#/properties/a", "#/anyOf/0", "#/$defs/a/items", "#/$defs/none", "#x", "a#/b")
    refs = iter(draw.choices(targets, k=9))
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": next(refs)}, "b": {"items": {"$ref": next(refs)}}},
        "required": draw.choice((["a"], [])),
        "$defs": {"a": {"items": {"$ref": next(refs)}, "allOf": [{"$ref": next(refs)}]}},
    }
    if draw.random() < 0.5:
        schema["anyOf"] = [{"$ref": next(refs)}, {"type": "object"}]
    return "json", schema


def nested_schema(draw: Draw) -> tuple[str, Any]:
    wrap, schema = _wrapper(draw), {"type": "string"}
    closers = draw.choice(("a", "]", "}}", '"]'))
    for i in range(min(_size(draw, 400), 300)):
        inner = wrap(schema, i)
        if len(json.dumps(inner)) > 100_000:
            break
        schema = {"properties": {closers: inner}} if draw.random() < 0.3 else inner
    return "json", schema


def wide_schema(draw: Draw) -> tuple[str, Any]:
    count = _size(draw, 2500)
    kind = draw.randrange(4)
    if kind == 0:
        return "json", {"enum": [f"value {i}" for i in range(count)]}
    inner = draw.choice(({}, {"type": "integer"}, {"type": "string", "maxLength": count}))
    if kind == 1:
        return "json", {"type": "object", "properties": {f"p{i}": inner for i in range(count)}}
    if kind == 2:
        return "json", {"anyOf": [{"type": "object", "properties": {f"p{i}": inner}}
                                  for i in range(count)]}  # fmt: skip
    return "json", {"type": "array", "items": inner, "minItems": count, "maxItems": 10 * count}


def costly_keywords(draw: Draw) -> tuple[str, Any]:
    number = draw.choice((0, 3, 10**3, 10**6, 10**9, 10**30, -1, 0.5, 1e-9, 1e300))
    pattern = regular_expression(draw)[1][:20_000]
    schemas = (
        {"type": "string", "pattern": pattern},
        {"type": "string", "maxLength": number},
        {"type": "string", "minLength": number},
        {"type": "integer", "multipleOf": number},
        {"type": "number", "minimum": number, "exclusiveMaximum": 2 * number},
        {"type": "array", "items": {}, "minItems": number},
        {"type": "object", "minProperties": number},
        {"type": "object", "patternProperties": {pattern: {}}},
        {"type": "object", "propertyNames": {"pattern": pattern}},
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": 30 + i}]} for i in range(20)]},
    )
    return "json", draw.choice(schemas)


def regular_expression(draw: Draw) -> tuple[str, Any]:
    count = _size(draw, 9000)
    few = min(count, 60)
    texts = (
        "(" * count + "a" + ")" * count,
        "([)]" * count + "a" + ")" * count,
        "(a|" * few + "b" + ")*" * few,
        "(" * few + "a" + "{1,9}){1,9}" * few,
        "a" + draw.choice(("?", "??", "*", "{2}", "{1,3}")) * count,
        "|".join(f"a{i}" for i in range(count)),
        "(a|bc)" * count,
        "[" * count,
        "\\" * count,
        f".{{{count}}}",
        f"(.*a.{{{few}}}){{{few}}}",
        "(?i:" * few + "é" + ")" * few,
        f"a{{{count * 10**6}}}",
        "\\p{L}" * few + "[\\w--\\d]",
    )
    return "regex", draw.choice(texts)


def rules(draw: Draw) -> tuple[str, Any]:
    """Of both syntaxes: chains, cycles, trees."""
    gbnf = draw.random() < 0.4
    count = _size(draw, 6000)
    start, sign = ("root", "::=") if gbnf else ("start", ":")
    upper = not gbnf and draw.random() < 0.25
    name = (lambda i: f"T{i}") if upper else (lambda i: f"r{i}")
    last = draw.choice((name(0), '"a"', name(count // 2), '""', "missing"))
    body = draw.choice(
        ("{0}", '"x" {0} "y"', '"x" {0} | "y"', '{0} | "y"', '{0} "x" |', "{0} {0}", "{0}*",
         "({0} | {1})?", '{1} "z"', '"x"? {0}')
    )  # fmt: skip
    lines = [f"{start} {sign} {name(0)}"]
    for i in range(count):
        lines.append(f"{name(i)} {sign} {body.format(name(i + 1), name(draw.randrange(count)))}")
    lines.append(f"{name(count)} {sign} {last}")
    if draw.random() < 0.2:
        lines = [lines[0], *reversed(lines[1:])]
    return "grammar", "\n".join(lines) + "\n"


def odd_grammar(draw: Draw) -> tuple[str, Any]:
    count = _size(draw, 9000)
    texts = (
        "start: " + "(" * count + '"a"' + ")" * count,
        "root ::= " + "(" * count + '"a"' + ")" * count,
        "start: " + '("b" | ' * count + '"a"' + ")" * count,
        'start: "a"' + draw.choice("?*+") * count,
        "start: T\nT: " + "~" * count + "/a/",
        "start: T\nT: " + " & ".join(["/a+/"] * min(count, 200)),
        f'start: "a"~{count}..{count * 1000}',
        f'root ::= "a"{{{count},}}',
        "start: start start | ",
        'start: "' + "\\" * count,
        "start: /" + "(" * count,
        "root ::= [" + "[" * count,
        "start: %json " + json.dumps(reference_chain(draw)[1]),
        "root ::= root | root",
        'root ::= "a" root | root "a"',
        ":" * count,
    )
    return "grammar", draw.choice(texts)


def structural_tag(draw: Draw) -> tuple[str, Any]:
    schema = draw.choice((reference_chain, reference_cycle, nested_schema))(draw)[1]
    schema = json.loads(schema) if isinstance(schema, str) else schema
    if draw.random() < 0.3:
        tag = {"begin": "<a>", "schema": schema, "end": "</a>"}
        return "structural_tag", {"structures": [tag] * draw.choice((1, 3)), "triggers": ["<"]}
    part: Any = draw.choice(
        ({"type": "json_schema", "json_schema": schema},
         {"type": "regex", "pattern": regular_expression(draw)[1][:9000]},
         {"type": "any_text", "excludes": ["</"]})
    )  # fmt: skip
    for _ in range(min(_size(draw, 100), 60)):
        part = draw.choice(
            ({"type": "sequence", "elements": [part]},
             {"type": "or", "elements": [part, {"type": "const_string", "value": "x"}]},
             {"type": "optional", "content": part},
             {"type": "star", "content": part},
             {"type": "tag", "begin": "<", "content": part, "end": ">"})
        )  # fmt: skip
    return "structural_tag", {"type": "structural_tag", "format": part}


def choices(draw: Draw) -> tuple[str, Any]:
    count = _size(draw, 9000)
    return "choice", tuple(draw.choice((f"option {i}", "x" * i)) for i in range(1, count + 1))


MAKERS = (
    reference_chain, reference_cycle, reference_web, pointer_maze, nested_schema, wide_schema,
    costly_keywords, regular_expression, rules, rules, odd_grammar, structural_tag, choices,
)  # fmt: skip
