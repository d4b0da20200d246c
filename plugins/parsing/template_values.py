"""Reads the calls in a region of a response template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .block_calls import object_of, objects
from .cursor import whole_characters
from .regex_search import Match, Search, pattern_set
from .schema_values import json_of, parameter_types
from .template_forms import (
    PLACEHOLDER,
    BodyForm,
    JsonForm,
    LinesForm,
    ScalarForm,
    Shape,
    TagsForm,
    ValueForm,
)

MAX_READ_AGAIN = 1024
"""Most characters of tags that may be read twice, besides four times the text."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_KEY = re.compile(r"\s*(\w+)\s*(?=:)")
_TRUE = ("true", "1")


class Written:
    """A value written as text."""

    __slots__ = ("text", "value")

    def __init__(self, text: str, value: Any) -> None:
        self.text, self.value = text, value


class Body:
    """The text of one region of calls, read incrementally."""

    def __init__(self, form: BodyForm) -> None:
        self._form = form
        self._parts: list[str] = []
        self._tags = Tags(form) if isinstance(form, TagsForm) else None

    def add(self, text: str) -> None:
        if self._tags is not None:
            self._tags.add(text)
        else:
            self._parts.append(text)

    def value(self) -> Any:
        """Return the text's value. Raises ValueError."""
        form, text = self._form, "".join(self._parts)
        if self._tags is not None:
            return self._tags.finish()
        if isinstance(form, LinesForm):
            return _lines(text, form)
        assert isinstance(form, JsonForm | ScalarForm)
        return read_value(text, form)


class Tags:
    """Finds tags in a text that arrives in pieces."""

    def __init__(self, form: TagsForm) -> None:
        self._form = form
        self._search = Search(pattern_set(form.tag))
        self._parts: list[str] = []
        self._size = self._read_again = 0
        """Characters so far; characters read again, after a match whose end was found late."""
        self._matches: list[Match] = []

    def add(self, text: str) -> None:
        """Add a piece. Raises ValueError if too much must be read twice."""
        self._parts.append(text)
        start, self._size = self._size, self._size + len(text)
        self._read(text, start)

    def finish(self) -> dict[str, Any]:
        """End the text; return the values by key. Raises ValueError as `add`."""
        while (match := self._search.finish()) is not None:
            self._read(*self._after(match, "", self._size))
        text, form = "".join(self._parts), self._form
        values: dict[str, list[Written]] = {}
        for match in self._matches:
            groups = {name: text[start:end] for name, (start, end) in match.groups.items()}
            value = _written(groups.get("value", ""), form.value)
            values.setdefault(groups.get("key", ""), []).append(value)
        return {
            key: same if form.merge and len(same) > 1 else same[-1] for key, same in values.items()
        }

    def _read(self, text: str, start: int) -> None:
        while (match := self._search.read(text, start)) is not None:
            text, start = self._after(match, text, start)

    def _after(self, match: Match, text: str, start: int) -> tuple[str, int]:
        """Record a match; return the text to read after it, and its position."""
        self._matches.append(match)
        self._read_again += self._search.position - match.end
        if match.end < start:
            self._read_again += self._size // 64  # The pieces are joined once more.
            text, start = "".join(self._parts)[match.end :], match.end
        if self._read_again > 4 * (self._size + MAX_READ_AGAIN):
            raise ValueError("tags that cannot be told apart in linear time")
        self._search = Search(pattern_set(self._form.tag), match.end)
        return text, start


def _lines(text: str, form: LinesForm) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in text.split(form.line_separator):
        key, separator, value = line.partition(form.separator)
        if separator:
            key, value = (key.strip(), value.strip()) if form.strip else (key, value)
            values[key] = _written(value, form.value)
    return values


def _written(text: str, form: ValueForm | None) -> Written:
    """Return a value, or the text if it does not fit its form."""
    try:
        return Written(text, text if form is None else read_value(text, form))
    except ValueError:
        return Written(text, text)


def read_value(text: str, form: ValueForm) -> Any:
    if isinstance(form, ScalarForm):
        bare = text.strip() if form.strip else text
        if form.kind == "int":
            return int(bare)
        if form.kind == "float":
            return float(bare)
        return bare.lower() in _TRUE if form.kind == "bool" else bare
    try:
        return json.loads(_as_json(text, form), strict=False)
    except (ValueError, RecursionError) as error:
        if form.allow_non_json:
            return text.strip()
        raise ValueError(str(error)) from None


def _as_json(text: str, form: JsonForm) -> str:
    """Return the text with JSON's strings and keys. Raises ValueError."""
    if not form.delimiters and not form.unquoted_keys:
        return text
    closers = dict(form.delimiters)
    marks = sorted([*closers, '"', "{", ","], key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, marks)))
    parts, at = [], 0
    while (match := pattern.search(text, at)) is not None:
        parts.append(text[at : match.start()])
        at = match.end()
        if match[0] in closers:
            end = text.find(closers[match[0]], at)
            if end < 0:
                raise ValueError("a string that does not end")
            parts.append(json.dumps(text[at:end]))
            at = end + len(closers[match[0]])
        elif match[0] == '"':
            string = _STRING.match(text, match.start())
            if string is None:
                raise ValueError("a string that does not end")
            parts.append(string[0])
            at = string.end()
        else:
            parts.append(match[0])
            if form.unquoted_keys and (key := _KEY.match(text, at)):
                parts.append(f'"{key[1]}"')
                at = key.end()
    return "".join([*parts, text[at:]])


def calls_of(value: Any, shape: Shape | None, groups: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return a region's calls as (name, arguments). Raises ValueError."""
    if shape is None:
        values = value
    elif not shape.each:
        values = _applied(shape.transform, {**groups, "content": value})
    elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        values = [_applied(shape.transform, {**groups, **item}) for item in value]
    else:
        raise ValueError("it is no list of objects")
    return [_call(each) for each in (values if isinstance(values, list) else [values])]


def _applied(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, Mapping):
        return {key: _applied(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_applied(value, scope) for value in transform]
    match = PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    value: Any = scope
    for key in match[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"{match[0]}: there is no {key!r}")
        value = value[key]
    return value


def _call(value: Any) -> tuple[str, Any]:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    name = name.text if isinstance(name, Written) else name
    if not isinstance(name, str) or not name.strip() or not isinstance(function, Mapping):
        raise ValueError("a call without a name")
    return whole_characters(name).strip(), function.get("arguments")


def arguments_json(arguments: Any, schema: Any) -> str:
    """Return arguments as JSON; the tool's schema types those written as text. Raises ValueError if
    they are not an object.
    """
    if isinstance(arguments, Written):
        arguments = arguments.text
    if isinstance(arguments, str):
        read = object_of(arguments)
        if read is None:
            raise ValueError("arguments that are no object")
        return objects(read)
    if arguments is None:
        return "{}"
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments that are no object")
    return objects(
        {str(key): _json(value, parameter_types(schema, key)) for key, value in arguments.items()}
    )


def _json(value: Any, types: frozenset[str]) -> str:
    if isinstance(value, Written) and types:
        return json_of(value.text, types)
    if isinstance(value, str) and types and "string" not in types:
        return json_of(whole_characters(value), types)
    try:
        return json.dumps(value, allow_nan=False, default=lambda written: written.value)
    except RecursionError:
        raise ValueError("arguments that are nested too deep") from None
