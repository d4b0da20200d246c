"""Decides which grammars are provably small, needing no sandbox.

Input size and repetitions bound a compiler's recursion, time and memory; `is_plain` and `is_tiny`
bound both.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from ...protocols.grammars import GrammarSpec
from .keywords import NOTES, subschemas

MAX_PLAIN_NODES = 500
"""Most subschemas, names and enum values."""
MAX_PLAIN_TEXT = 16_000
"""Most characters of a plain schema or choices."""
MAX_PLAIN_COUNT = 200
"""Largest `maxItems` and the like."""
MAX_PLAIN_PROPERTIES = 40
"""Most properties per object: backends expand every omission."""
MAX_PLAIN_NUMBER = 10**15
"""Largest number: backends write bounds digit by digit."""
MAX_TINY_TEXT = 256
MAX_TINY_PRODUCT = 10_000
"""Most copies by repetitions: the product of all numbers."""

_COUNTS = frozenset(("minItems", "maxItems"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_CHOICES = frozenset(("$ref", "anyOf", "oneOf"))
_PLAIN = _COUNTS | _BOUNDS | frozenset(
    ("type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum",
     "const")
)  # fmt: skip
"""Keywords that compile in linear time. Choices count only alone: beside others, backends multiply
combinations."""


def is_plain(spec: GrammarSpec) -> bool:
    """Return whether any backend compiles this quickly: an ordinary schema without regular
    expressions.
    """
    if len(spec.text) > MAX_PLAIN_TEXT or spec.kind not in ("json_object", "choice", "json"):
        return False
    if spec.kind != "json":
        return True
    schema = json.loads(spec.text)
    values = list(itertools.islice(_values(schema), MAX_PLAIN_NODES + 1))
    if len(values) > MAX_PLAIN_NODES or not all(map(_is_plain_number, values)):
        return False
    return all(map(_is_plain_part, subschemas(schema)))


def is_tiny(spec: GrammarSpec) -> bool:
    """Return whether a backend with its own limits compiles this quickly: a short text."""
    if len(spec.text) > MAX_TINY_TEXT or re.search("[0-9][eE]", spec.text):
        return False
    product = math.prod(max(1, int(number)) for number in re.findall(r"[0-9]+", spec.text))
    return product <= MAX_TINY_PRODUCT


def _is_plain_part(part: dict[str, Any]) -> bool:
    keywords = part.keys() - NOTES
    if keywords & _CHOICES:
        if len(keywords) > 1:
            return False
    elif keywords - _PLAIN:
        return False
    for name in _COUNTS & keywords:
        if not (isinstance(part[name], int) and 0 <= part[name] <= MAX_PLAIN_COUNT):
            return False
    for name in _BOUNDS & keywords:
        if not isinstance(part[name], int | float):
            return False
    properties = part.get("properties")
    return not (isinstance(properties, dict) and len(properties) > MAX_PLAIN_PROPERTIES)


def _is_plain_number(value: Any) -> bool:
    """Whether a number has few digits; beyond 64 bits, a backend crashed."""
    if not isinstance(value, int | float):
        return True
    return abs(value) <= MAX_PLAIN_NUMBER and "e" not in repr(value)


def _values(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
