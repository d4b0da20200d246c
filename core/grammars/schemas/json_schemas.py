"""Rewrites JSON schemas with keywords of grammar backends; reports what is unchecked."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

from ...errors import shown
from .keywords import NOTES, path_of, placed_subschemas
from .patterns import matches_among, weakened

logger = logging.getLogger("jackfield.structured")

CHECKED_FORMATS = frozenset(
    ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""Enforced string formats; others are annotations."""
MAX_NAMED = 1 << 17
"""Most characters copied in a schema by listing property names."""

_LEAST = frozenset(("minLength", "minItems", "minProperties", "minContains"))
_NAME_LENGTHS = frozenset(("minLength", "maxLength"))

_logged: set[str] = set()


def adapted(schema: Any, *, strict: bool) -> tuple[Any, list[str]]:
    """Change a schema in place: drop keywords without effect, turn `propertyNames` into properties,
    weaken or drop the unenforceable. Returns (schema, unchecked).

    strict: raises ValueError with keyword and path instead.
    """
    unchecked: dict[str, None] = {}
    copied = 0
    for place, part in placed_subschemas(schema):
        _drop_idle(part)
        if "propertyNames" in part:
            copied += _name_properties(part, MAX_NAMED - copied)
        for keyword, words in _weaken(part):
            if strict:
                raise ValueError(
                    f"{path_of(place, keyword)}: {words} cannot be enforced by a grammar; leave "
                    "it out, or strict, without which it is not checked"
                )
            unchecked[words] = None
        if isinstance(part.get("patternProperties"), dict):
            copied += _name_patterns(part, MAX_NAMED - copied)
    return schema, list(unchecked)


def log_unchecked(unchecked: list[str]) -> None:
    """Log each description once."""
    for words in unchecked:
        if words not in _logged and len(_logged) < 100:
            _logged.add(words)
            logger.info("structured outputs: %s is not checked", words)


def _drop_idle(part: dict[str, Any]) -> None:
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    for keyword in _LEAST & part.keys():
        if part[keyword] == 0 and part[keyword] is not False:
            del part[keyword]
    names = part.get("propertyNames")
    if names is True or (
        isinstance(names, dict)
        and names.keys() - NOTES <= {"type"}
        and names.get("type", "string") == "string"
    ):
        del part["propertyNames"]
    kinds = part.get("type", "string")
    if "format" in part and "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        del part["format"]  # Of a number, say: formats constrain strings alone.


def _weaken(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Remove the unenforceable; yield (keyword, description)."""
    format, pattern = part.get("format"), part.get("pattern")
    if format is not None and not (isinstance(format, str) and format in CHECKED_FORMATS):
        del part["format"]
        yield "format", f"format {shown(format)}"
    if isinstance(pattern, str):
        weaker, reason = weakened(pattern)
        if reason is not None and "format" in part:
            del part["pattern"]
            yield "pattern", f"pattern {shown(pattern)}, which {reason}, beside format {format!r}"
        elif reason is not None:
            part["pattern"] = weaker
            yield "pattern", f"all of pattern {shown(pattern)}, which {reason},"
    if part.get("uniqueItems") is True:
        del part["uniqueItems"]
        yield "uniqueItems", "uniqueItems"
    named = part.get("patternProperties")
    for pattern in list(named) if isinstance(named, dict) else ():
        weaker, reason = weakened(pattern)
        if reason is not None:
            _rename(part, pattern, weaker)
            yield "patternProperties", f"all of pattern {shown(pattern)}, which {reason},"


def _rename(part: dict[str, Any], pattern: str, weaker: str) -> None:
    """Weaken a pattern of `patternProperties`."""
    named = part["patternProperties"]
    if weaker in named:  # Of two equal ones, none can be enforced.
        weaker_schema = named.pop(pattern)
        named[weaker] = {"anyOf": [named[weaker], weaker_schema]}
    else:
        part["patternProperties"] = {
            weaker if key == pattern else key: schema for key, schema in named.items()
        }


# ---------------------------------------------------------------- names of properties


def _name_properties(part: dict[str, Any], room: int) -> int:
    """Turn `propertyNames` into `properties` or `patternProperties`; return the characters copied.

    room: most characters. Raises ValueError for keywords that cannot be converted.
    """
    names = part.pop("propertyNames")
    if names is False:
        names = {"enum": []}
    if not isinstance(names, dict):
        raise ValueError("propertyNames: must be a schema")
    keywords = names.keys() - NOTES - {"type"}
    if names.get("type", "string") != "string":
        raise ValueError("propertyNames: type must be string")
    if "patternProperties" in part:
        raise ValueError("propertyNames beside patternProperties is not supported")
    if keywords in ({"enum"}, {"const"}):
        values = names["enum"] if "enum" in names else [names["const"]]
        return _list_properties(part, values, room)
    if part.get("properties"):
        raise ValueError("propertyNames beside properties is not supported, but with enum")
    if keywords == {"pattern"} and isinstance(names["pattern"], str):
        pattern = names["pattern"]
    elif keywords <= _NAME_LENGTHS and all(
        isinstance(names[keyword], int) and names[keyword] >= 0 for keyword in keywords
    ):
        pattern = rf"^(.|\n){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    else:
        keyword = min(keywords - {"pattern"} or keywords)
        raise ValueError(f"propertyNames: {keyword} is not supported")
    extra = part.get("additionalProperties", True)
    part["additionalProperties"] = False
    if extra is not False:
        part["patternProperties"] = {pattern: extra}
    return 0


def _list_properties(part: dict[str, Any], names: Any, room: int) -> int:
    """Copy the additional properties' schema for each name; return the characters copied."""
    if not isinstance(names, list):
        raise ValueError("propertyNames: enum must be a list")
    existing = part.get("properties")
    properties = existing if isinstance(existing, dict) else {}
    extra = part.get("additionalProperties", True)
    listed = dict.fromkeys(name for name in names if isinstance(name, str))
    kept = {name: schema for name, schema in properties.items() if name in listed}
    new = [name for name in listed if name not in kept] if extra is not False else []
    copied = len(json.dumps(extra)) * len(new)
    if copied > room:
        raise ValueError("propertyNames: too many names for so large a schema")
    part["properties"] = kept | {name: copy.deepcopy(extra) for name in new}
    part["additionalProperties"] = False
    return copied


def _name_patterns(part: dict[str, Any], room: int) -> int:
    """Move schemas of patterns that match only property names into these properties, as backends
    would search further; return the characters copied.

    room: most characters. Raises ValueError beyond.
    """
    existing, required = part.get("properties"), part.get("required")
    properties: dict[str, Any] = dict(existing) if isinstance(existing, dict) else {}
    listed = required if isinstance(required, list) else []
    names = {name for name in (*listed, *properties) if isinstance(name, str)}
    patterns = part["patternProperties"]
    kept: dict[str, Any] = {}
    copied = 0
    for pattern, schema in patterns.items():
        matches = matches_among(pattern, names)
        if matches is None:
            kept[pattern] = schema
            continue
        copied += len(json.dumps(schema)) * max(0, len(matches) - 1)
        if copied > room:
            raise ValueError("patternProperties: too many names for so large a schema")
        for name in sorted(matches):
            properties[name] = _both(properties.get(name, True), schema)
    if len(kept) == len(patterns):
        return 0
    part["properties"], part["patternProperties"] = properties, kept
    if not kept:
        del part["patternProperties"]
        part.setdefault("additionalProperties", True)
    return copied


def _both(first: Any, second: Any) -> Any:
    """Return a schema for both."""
    if second is True or (isinstance(second, dict) and second.keys() <= NOTES):
        return first
    if json.dumps(first) == json.dumps(second):
        return first
    if first is True or first == {}:
        return copy.deepcopy(second)
    if (
        isinstance(first, dict)
        and isinstance(second, dict)
        and second.keys() <= {"type"} | NOTES
        and isinstance(second["type"], str)
        and first.get("type") == second["type"]
    ):
        return first
    return {"allOf": [first, copy.deepcopy(second)]}
