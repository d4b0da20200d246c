"""Formats of separate arguments, as text or JSON, from a tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...protocols.parsers import ArgumentForm

ANY_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"
_KEY = re.compile(r"[\w.\-]+")
_SAID = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated", "$schema", "$id", "$defs",
     "definitions", "$comment", "readOnly", "writeOnly", "strict")
)  # fmt: skip
"""Keywords that do not constrain a string."""
_OBJECT = frozenset((*_SAID, "properties", "required", "additionalProperties"))
MAX_ALTERNATIVES = 500
"""Most references and alternatives of an argument."""
MAX_OPTIONAL = 50
"""Most consecutive optional arguments with separators."""
MAX_COPIED = 1 << 20
"""Most characters copied for references."""
ANY_CHARACTER = r"(.|\n)"

_DAY = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = "([01][0-9]|2[0-3])(:[0-5][0-9]){2}"
_ZONE = r"(\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_WORD = r"[A-Za-z0-9_%+\-]+"
_FORMATS = {
    "date": _DAY,
    "time": _TIME + _ZONE,
    "date-time": f"{_DAY}T{_TIME}{_ZONE}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": rf"{_WORD}(\.{_WORD})*@[A-Za-z0-9]+([.\-][A-Za-z0-9]+)*\.[A-Za-z]{{2,}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}
"""String of a format: a subset of what it allows."""

Format = dict[str, Any]


def arguments_format(form: ArgumentForm, schema: Mapping[str, Any] | None) -> Format:
    """Return the format of a call's arguments, in the schema's order.

    schema: of the arguments' object; None: any. Raises ValueError with an unenforceable keyword.
    """
    if schema is None:
        return _any_arguments(form)
    if other := sorted(schema.keys() - _OBJECT):
        raise ValueError(f"{other[0]} of a whole object cannot be enforced in this model's calls")
    properties = schema.get("properties")
    extra = schema.get("additionalProperties", not properties)
    if extra is not False:
        if properties:
            raise ValueError("additionalProperties cannot be enforced in this model's calls")
        return _any_arguments(form)
    properties = properties if isinstance(properties, Mapping) else {}
    required = set(schema.get("required") or ())
    if unknown := sorted(required - properties.keys()):
        raise ValueError(f"required: {unknown[0]} is none of properties")
    referring = sum("$ref" in json.dumps(value) for value in properties.values())
    if referring * len(json.dumps(schema)) > MAX_COPIED:
        raise ValueError("too many parameters refer to a large schema")
    entries = [
        (_argument(form, key, _value(form, key, properties[key], schema)), key in required)
        for key in properties
    ]
    return _in_order(entries, form.between)


def _in_order(arguments: Sequence[tuple[Format, bool]], between: str) -> Format:
    """Return the format of (format, required) arguments in order, separated by `between`."""

    def rest(start: int) -> list[Format]:
        parts: list[Format] = []
        for argument, required in arguments[start:]:
            part = _sequence([_text(between), argument]) if between else argument
            parts.append(part if required else {"type": "optional", "content": part})
        return parts

    if not between:
        return _sequence(rest(0))
    if next((i for i, (_, required) in enumerate(arguments) if required), 0) > MAX_OPTIONAL or (
        len(arguments) > MAX_OPTIONAL and not any(required for _, required in arguments)
    ):
        raise ValueError(f"more than {MAX_OPTIONAL} parameters that are not required")
    ways: list[Format] = []
    for place, (argument, required) in enumerate(arguments):
        ways.append(_sequence([argument, *rest(place + 1)]))
        if required:
            return _either(ways)
    return {"type": "optional", "content": _either(ways)} if ways else _text("")


def _any_arguments(form: ArgumentForm) -> Format:
    before, _, after = form.begin.partition("{key}")
    value: Format = {"type": "json_schema", "json_schema": {}}
    if form.plain:
        value = _free(form)
    key: Format = {"type": "regex", "pattern": ANY_KEY}
    pair = _sequence([_text(before), key, {**_tagged(form, value), "begin": after}])
    if not form.between:
        return {"type": "star", "content": pair}
    more = {"type": "star", "content": _sequence([_text(form.between), pair])}
    return {"type": "optional", "content": _sequence([pair, more])}


def _argument(form: ArgumentForm, key: str, value: Format) -> Format:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no name that a parameter of this model's calls can have")
    return {**_tagged(form, value), "begin": form.begin.replace("{key}", key)}


def _tagged(form: ArgumentForm, value: Format) -> Format:
    return {"type": "tag", "begin": "", "content": value, "end": form.end}


# ---------------------------------------------------------------- one value


def _value(form: ArgumentForm, key: str, schema: Any, root: Mapping[str, Any]) -> Format:
    try:
        alternatives = _alternatives(schema, root)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    kinds = {_kind(alternative) for alternative in alternatives}
    if form.plain and "string" in kinds and kinds - {"string", "null"}:
        raise ValueError(
            f"{key}: strings and other values cannot be distinguished in this model's calls"
        )
    if form.plain and "any" in kinds:
        if len(alternatives) > 1 or _constraints(alternatives[0]):
            raise ValueError(f"{key}: needs a type to be enforced in this model's calls")
        return _free(form)
    return _either([_alternative(form, key, alternative, root) for alternative in alternatives])


def _alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return equivalent alternatives of one type each. Raises ValueError if too many."""
    alternatives: list[Mapping[str, Any]] = []
    pending = [schema]
    for _ in range(MAX_ALTERNATIVES):
        if not pending:
            return alternatives
        current = pending.pop()
        if not isinstance(current, Mapping):
            alternatives.append({})
        elif isinstance(current.get("$ref"), str) and not _constraints(current) - {"$ref"}:
            pending.append(_referred(current["$ref"], root))
        elif (inner := _inner(current)) is not None:
            pending.extend(reversed(inner))
        else:
            alternatives.append(current)
    raise ValueError("has too many alternatives")


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(part) if part and isinstance(target, Mapping) else target
    return target


def _inner(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return a schema's listed alternatives, or None."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and not _constraints(schema) - {key}:
            return list(schema[key])
    if isinstance(schema.get("enum"), list):
        return [{"const": value} for value in schema["enum"]]
    if isinstance(schema.get("type"), list) and "const" not in schema:
        return [{**schema, "type": kind} for kind in schema["type"]]
    return None


def _kind(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        value = schema["const"]
        return "string" if isinstance(value, str) else "null" if value is None else "other"
    kind = schema.get("type")
    if kind is None:
        return "any"
    return kind if kind in ("string", "null") else "other"


def _constraints(schema: Mapping[str, Any]) -> set[str]:
    return set(schema.keys() - _SAID)


def _alternative(
    form: ArgumentForm, key: str, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> Format:
    if form.plain and _kind(schema) == "string":
        return _plain_text(form, key, schema)
    if "const" in schema:
        text = json.dumps(schema["const"], ensure_ascii=False)
        return _text(form.named.get(text, text))
    if not _constraints(schema):
        texts = {"boolean": ("true", "false"), "null": ("null",)}.get(schema.get("type", ""), ())
        if texts:
            return _either([_text(form.named.get(text, text)) for text in texts])
    return {"type": "json_schema", "json_schema": _alone(schema, root)}


def _alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with its definitions."""
    if "$ref" not in json.dumps(schema):
        return dict(schema)
    place = "#/$defs/parameters"
    return {**moved(schema, place), "$defs": {"parameters": moved(root, place)}}


def _plain_text(form: ArgumentForm, key: str, schema: Mapping[str, Any]) -> Format:
    if "const" in schema:
        text = schema["const"]
        if any(mark and mark in text for mark in (form.end, *form.never)):
            raise ValueError(f"{key}: {text!r} cannot be written in this model's calls")
        return _text(text)
    constraints = _constraints(schema)
    if not constraints:
        return _free(form)
    if constraints <= {"minLength", "maxLength"}:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return _expression(form, f"{ANY_CHARACTER}{{{least},{most}}}")
    if constraints == {"format"} and schema["format"] in _FORMATS:
        return _expression(form, _FORMATS[schema["format"]])
    if constraints == {"pattern"}:
        return _expression(form, _unanchored(key, schema["pattern"]))
    name = sorted(constraints - {"pattern", "minLength", "maxLength"} or constraints)[0]
    raise ValueError(f"{key}: {name} of a string cannot be enforced in this model's calls")


def _unanchored(key: str, pattern: Any) -> str:
    """Return an expression for whole texts that contain a match."""
    if not isinstance(pattern, str):
        raise ValueError(f"{key}: pattern must be a text")
    bare = pattern.removeprefix("^").removesuffix("$")
    if bare != pattern and "|" in bare:
        raise ValueError(f"{key}: pattern with ^ or $ beside | cannot be enforced")
    begin = "" if pattern.startswith("^") else f"{ANY_CHARACTER}*"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else f"{ANY_CHARACTER}*"
    return f"{begin}({bare}){end}"


def _free(form: ArgumentForm) -> Format:
    return {"type": "any_text", "excludes": list(form.never)}


def _expression(form: ArgumentForm, pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern, "excludes": [form.end, *form.never]}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements} if elements else _text("")


def _either(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def moved(schema: Any, place: str) -> Any:
    """Return a copy with references changed for its new place."""
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = place + reference[1:]
    return copy
