"""Rewrites JSON schemas with keywords that grammar backends support; reports what is unchecked."""

from __future__ import annotations

import copy
import json
import logging
import re
from typing import Any

from .keywords import NOTES, subschemas

logger = logging.getLogger("jackfield.structured")

CHECKED_FORMATS = frozenset(
    ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""Formats of strings that are enforced. All others are annotations."""
MAX_NAMED = 1 << 17
"""Characters of schemas, in one schema, that are copied because property names are listed."""

_LEAST = frozenset(("minLength", "minItems", "minProperties", "minContains"))
_NAME_LENGTHS = frozenset(("minLength", "maxLength"))
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")

_logged: set[str] = set()


def adapted(schema: Any, *, strict: bool) -> tuple[Any, list[str]]:
    """Change a schema in place: drop keywords without effect, and turn `propertyNames` into
    properties. Returns (the schema, descriptions of what is not checked).

    strict: nothing may stay unchecked; raises ValueError with the keyword.
    """
    unchecked: dict[str, None] = {}
    copied = 0
    for part in subschemas(schema):
        _drop_idle(part)
        if "propertyNames" in part:
            copied += _name_properties(part, MAX_NAMED - copied)
        for keyword, words in _unenforceable(part):
            if strict:
                raise ValueError(
                    f"{words} cannot be enforced by a grammar; leave it out, or strict, without "
                    "which it is not checked"
                )
            del part[keyword]
            unchecked[words] = None
    return schema, list(unchecked)


def log_unchecked(unchecked: list[str]) -> None:
    """Log each description once per process."""
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


def _unenforceable(part: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the keywords that no grammar can enforce, as (keyword, description)."""
    keywords: list[tuple[str, str]] = []
    format = part.get("format")
    if isinstance(format, str) and format not in CHECKED_FORMATS:
        keywords.append(("format", f"format {format[:60]!r}"))
    elif isinstance(format, str):
        pattern = part.get("pattern")
        if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
            keywords.append(("pattern", f"a pattern that looks around, beside format {format!r},"))
    if part.get("uniqueItems") is True:
        keywords.append(("uniqueItems", "uniqueItems"))
    return keywords


# ---------------------------------------------------------------- names of properties


def _name_properties(part: dict[str, Any], room: int) -> int:
    """Turn `propertyNames` into `properties` or `patternProperties`; return the number of
    characters copied.

    room: the most characters to copy. Raises ValueError for keywords that cannot be converted.
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
    """Give each named property its own copy of the schema for additional properties, since
    `propertyNames` in a copy are listed in turn; return the number of characters copied."""
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
