"""Decides which grammars are provably small, so that they need no sandbox.

A compiler's recursion, time and memory are bounded by the size of its input and by the number of
repetitions. `is_plain` and `is_tiny` bound both, far below the size of a thread's stack.
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
"""Values of a plain schema: subschemas, names and enum values."""
MAX_PLAIN_TEXT = 16_000
"""Characters of a plain schema or a list of choices."""
MAX_PLAIN_COUNT = 200
"""Largest `maxItems` and the like of such a schema."""
MAX_PLAIN_PROPERTIES = 40
"""Properties of one object: backends lay out every way of leaving some away."""
MAX_PLAIN_NUMBER = 10**15
"""Largest number: backends write bounds digit by digit."""
MAX_TINY_TEXT = 256
"""Characters of a tiny grammar."""
MAX_TINY_PRODUCT = 10_000
"""Product of all numbers in a text: an upper bound of the copies that repetitions can make."""

_COUNTS = frozenset(("minItems", "maxItems"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_CHOICES = frozenset(("$ref", "anyOf", "oneOf"))
_PLAIN = _COUNTS | _BOUNDS | frozenset(
    ("type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum",
     "const")
)  # fmt: skip
"""Keywords that compile in a time in proportion to what there is to read. The choices join them
where they stand alone: beside others, backends multiply out every combination."""


def is_plain(spec: GrammarSpec) -> bool:
    """Return whether any backend compiles this quickly: a schema of ordinary size without regular
    expressions."""
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
    """Return whether a backend with limits of its own compiles this quickly: a short text of any
    kind."""
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
    """Whether a value, if it is a number, has few digits. Numbers that 64 bits do not hold have
    crashed a backend."""
    if not isinstance(value, int | float):
        return True
    return abs(value) <= MAX_PLAIN_NUMBER and "e" not in repr(value)


def _values(value: Any) -> Iterator[Any]:
    """Yield a value and all values nested in it."""
    todo = [value]
    while todo:
        value = todo.pop()
        yield value
        if isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)
