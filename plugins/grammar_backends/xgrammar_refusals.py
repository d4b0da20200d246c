"""What xgrammar ignores or misreads of a grammar, which is therefore refused."""

from __future__ import annotations

import re
from typing import Any

from ...core.errors import shown
from ...core.grammars.schemas.keywords import NOTES, subschemas
from ...core.grammars.schemas.patterns import weakened
from ...core.grammars.spec import tag_formats
from .structural_tags import read

_IGNORED = frozenset(
    (
        "allOf", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
        "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
        "uniqueItems", "$dynamicRef",
    )
)  # fmt: skip
"""Keywords that the package partly or wholly ignores."""
_FORMATS = frozenset(("date", "date-time", "email", "hostname", "ipv4", "ipv6", "time", "uuid"))
_TYPED = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
     "pattern", "minProperties", "maxProperties", "required")
)  # fmt: skip
"""Keywords ignored without a type, unless `properties` make it an object."""
_OF_OBJECTS = frozenset(("minProperties", "maxProperties", "required"))
_RANGES = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf")
"""Keywords of which the package reads only the first, ignoring constraints beside it."""
_LENGTHS = frozenset(("minLength", "maxLength"))

_CLASSES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),), "array": (list,), "object": (dict,),
}  # fmt: skip
_CLASS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ESCAPES = frozenset("dDwWsSnrtfvxuc0")
"""Letters and digits that the package reads specially after a backslash."""
_CLOSED = frozenset(
    ("const_string", "json_schema", "sequence", "or", "optional", "tag", "tags_with_separator")
)
"""Formats that fix their text, or make it JSON."""


def unsupported(schema: Any) -> str | None:
    """Return what the package would not enforce of a JSON schema, in one clause; None: nothing."""
    for part in subschemas(schema):
        keywords = part.keys()
        if keys := sorted(_IGNORED & keywords):
            return f"JSON schema keyword {keys[0]} is not supported"
        if reason := _passed_over(part):
            return reason
        if "format" in part and str(part["format"]) not in _FORMATS:
            return f"format {part['format']!r} is not supported"
        if "pattern" in part and _LENGTHS & keywords:
            return "pattern together with minLength or maxLength is not supported"
        if "format" in part and (beside := sorted((_LENGTHS | {"pattern"}) & keywords)):
            return f"format together with {beside[0]} is not supported"
        if "format" in part and part.get("type") not in ("string", ["string"]):
            return "format without the type string is not supported"
        for pattern in (part.get("pattern"), *_names_in(part)):
            if reason := misread(pattern):
                return reason
        untyped = _TYPED - (_OF_OBJECTS if "properties" in part else frozenset())
        if "type" not in part and (keys := sorted(untyped & keywords)):
            return f"{keys[0]} without a type is not supported"
        if "multipleOf" in part and part.get("type") != "integer":
            return "multipleOf of another type than integer is not supported"
        if "multipleOf" in part and (beside := sorted(_RANGES & keywords)):
            return f"multipleOf together with {beside[0]} is not supported"
        for name in ("anyOf", "oneOf"):
            if part.get(name) == []:
                return f"{name} without a schema allows nothing"
        if unwritten := _unwritten(part):
            return f"{unwritten[0]!r} is required, and none of properties"
        reference = part.get("$ref", "#")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return f"$ref {shown(reference)} is not one inside the schema"
        for name in (*_LENGTHS, "minItems", "maxItems", "minProperties", "maxProperties"):
            if name in part and not (type(part[name]) is int and part[name] >= 0):
                return f"{name} must be an integer of at least 0"
    return None


def _unwritten(part: dict[str, Any]) -> list[str]:
    """Return required names that the package does not write."""
    names, required = part.get("properties", {}), part.get("required")
    if not isinstance(names, dict) or not isinstance(required, list):
        return []
    return [name for name in required if isinstance(name, str) and name not in names]


def _names_in(part: dict[str, Any]) -> list[str]:
    named = part.get("patternProperties")
    return list(named) if isinstance(named, dict) else []


def _passed_over(part: dict[str, Any]) -> str | None:
    """Return a keyword that the package ignores because of another."""
    chosen = next((name for name in _ALONE if name in part), None)
    if chosen is None:
        named = part.get("patternProperties")
        required = part.get("required")
        if isinstance(named, dict) and (part.get("properties") or required):
            return "patternProperties beside properties or required is not supported"
        return None
    others = part.keys() - NOTES - {chosen, "strict", "nullable"}
    values = part["enum"] if chosen == "enum" else [part[chosen]] if chosen == "const" else None
    if values is not None and "type" in others and _all_of_type(values, part["type"]):
        others -= {"type"}
    if others:
        return f"{min(others)} beside {chosen} is not supported"
    return None


def _all_of_type(values: Any, kinds: Any) -> bool:
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return isinstance(values, list) and all(
        any(
            isinstance(kind, str)
            and isinstance(value, _CLASSES.get(kind, ()))
            and (kind == "boolean" or not isinstance(value, bool))
            for kind in kinds
        )
        for value in values
    )


def misread(pattern: Any) -> str | None:
    """Return what the package ignores or misreads in a pattern."""
    if not isinstance(pattern, str):
        return None
    reason = weakened(pattern)[1]
    if reason is not None:
        return f"a pattern that {reason} is not supported"
    if _half_anchored(pattern):
        return "pattern with ^ or $ on one side and | is not supported"
    for escape in _ESCAPE.findall(pattern):
        if escape[1].isalnum() and escape[1] not in _ESCAPES:
            return f"{escape} in a pattern is not supported"
    inner = _CLASS.sub("", pattern)
    for anchor in ("^", "$"):
        if anchor in (inner[1:] if anchor == "^" else inner[:-1]):
            return f"{anchor} inside a pattern is not supported"
    return None


def _half_anchored(pattern: Any) -> bool:
    """Whether ^ or $ may belong to one alternative only."""
    if not isinstance(pattern, str) or "|" not in pattern:
        return False
    return pattern.startswith("^") is not pattern.endswith("$")


def unsupported_tag(text: str) -> str | None:
    """Return the same of a structural tag."""
    tag = {"format": tag_format(text)}
    free = has_free_text(tag)
    for part in tag_formats(tag):
        if keys := sorted({"never", "never_first"} & part.keys()):
            return f"{keys[0]} is not supported"
        if part.get("type") == "regex" and part.get("excludes"):
            return "excludes beside an expression is not supported"
        if part.get("type") == "regex" and (reason := misread(part.get("pattern"))):
            return reason
        if part.get("type") == "json_schema":
            schema = part.get("json_schema")
            if reason := unsupported(schema) or (_unclean(schema) if free else None):
                return reason
    return None


def tag_format(text: str) -> Any:
    """Return a structural tag's format; None: it cannot be read."""
    try:
        return read(text)
    except ValueError:
        return None  # `compile` says what is wrong with it


def has_free_text(tag: dict[str, Any]) -> bool:
    """Return whether a part of a tag is neither fixed text nor JSON."""
    return any(part.get("type") not in _CLOSED for part in tag_formats(tag))


def _unclean(schema: Any) -> str | None:
    """Return where a control character could enter a string (xgrammar.py, `_clean_tokens`)."""
    if any(_LENGTHS & part.keys() for part in subschemas(schema)):
        return "minLength and maxLength inside a structural tag are not supported"
    return None
