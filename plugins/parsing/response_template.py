"""A checkpoint's response template, from its tokenizer_config.json.

Version 1 of transformers' `response_template`: text in `thinking` (or `reasoning_content`,
`reasoning`) and `content`, and calls in `tool_calls`. A template that needs more is refused with
the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...core.loading.json_file import object_if_there
from . import regex_program
from .regex_program import Program
from .regex_search import Pattern
from .template_forms import BodyForm, Shape, body_form, flag_of, shape_of

MAX_DELIMITER = 256
"""Most characters of an opening or closing mark."""
MAX_FIELDS = 16
END_OF_TEXT = "eos"
"""Stands for a closing mark."""
REASONING = ("thinking", "reasoning_content", "reasoning")
CONTENT = "content"
CALLS = "tool_calls"
FIELDS = (*REASONING, CONTENT, CALLS)
_KEYS = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_FIELD_KEYS = frozenset({
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join",
    "optional", "transform", "transform_each",
})  # fmt: skip


class Delimiter(NamedTuple):
    pattern: Pattern
    literals: tuple[str, ...]
    """Texts in it."""
    exact: bool
    """Whether it is one of the literals, not a pattern."""


class Field(NamedTuple):
    """A field of the message, and its region of an output."""

    name: str
    open: Delimiter | None
    """None: all text outside of other regions."""
    close: Delimiter | None
    """None: the end of the text."""
    strip: bool
    """Of text: whether to strip whitespace."""
    join: str
    """Of text: separator of several regions."""
    body: BodyForm | None
    """Of calls: how to read a region."""
    shape: Shape | None
    """Of calls: the transform; None: a call, or a list of calls."""

    @property
    def is_reasoning(self) -> bool:
        return self.name in REASONING


class ResponseTemplate(NamedTuple):
    anchor: Pattern
    """Ends where the assistant's turn begins in a prompt, at its last match."""
    fields: tuple[Field, ...]

    @property
    def rest(self) -> Field | None:
        """The field of text outside of other regions; None: it is dropped."""
        return next((field for field in self.fields if field.open is None), None)

    @property
    def calls(self) -> Field | None:
        """The field of calls, if any."""
        return next((field for field in self.fields if field.name == CALLS), None)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts in the marks, with reasoning's openers first."""
        ordered = sorted(self.fields, key=lambda field: not field.is_reasoning)
        marks = [mark for field in ordered for mark in (field.open, field.close) if mark]
        return tuple(dict.fromkeys(text for mark in marks for text in mark.literals))


def template_of(folder: Path) -> ResponseTemplate:
    """Return a checkpoint's response template. Raises ValueError, LoadError."""
    config = object_if_there(folder / "tokenizer_config.json")
    if (spec := config.get("response_template")) is not None:
        return read_template(spec)
    older = "response_schema" in config
    what = "response_schema alone, the older form" if older else "no response_template"
    raise ValueError(f"tokenizer_config.json has {what}")


def read_template(spec: Any) -> ResponseTemplate:
    """Check a response template. Raises ValueError beginning with the field's name."""
    fields = _object(spec, "response_template")
    _only(fields, _KEYS, "response_template")
    if fields.get("version", 1) != 1 or isinstance(fields.get("version", 1), bool):
        raise ValueError(f"response_template.version: {fields['version']!r}; 1 is read")
    _check_defaults(fields.get("defaults", {}))
    anchor = _delimiter(fields, "start_anchor", "response_template")
    if anchor is None:
        raise ValueError("response_template.start_anchor: is missing")
    specs = _object(fields.get("fields"), "response_template.fields")
    if not 0 < len(specs) <= MAX_FIELDS:
        raise ValueError(f"response_template.fields: there are {len(specs)} (1 to {MAX_FIELDS})")
    read = tuple(_field(name, specs[name]) for name in sorted(specs))
    open_less = [field.name for field in read if field.open is None]
    if len(open_less) > 1:
        raise ValueError(
            f"response_template.fields.{open_less[1]}.open: is missing, as is that of "
            f"{open_less[0]}"
        )
    return ResponseTemplate(anchor.pattern, read)


def _check_defaults(defaults: Any) -> None:
    for name, value in _object(defaults, "response_template.defaults").items():
        if name == "role" or (name in FIELDS and not value):
            continue
        raise ValueError(
            f"response_template.defaults.{name}: only role, and empty values of {', '.join(FIELDS)}"
        )


def _field(name: str, spec: Any) -> Field:
    scope = f"response_template.fields.{name}"
    if name not in FIELDS:
        raise ValueError(f"{scope}: the message has no such field ({', '.join(FIELDS)})")
    field = _object(spec, scope)
    _only(field, _FIELD_KEYS, scope)
    opener, closer = _delimiter(field, "open", scope), _delimiter(field, "close", scope)
    arguments = _object(field.get("content_args", {}), f"{scope}.content_args")
    content = field.get("content", "text")
    join = field.get("join")
    if join is not None and not isinstance(join, str):
        raise ValueError(f"{scope}.join: is no text")
    if name == CALLS:
        if opener is None:
            raise ValueError(f"{scope}.open: is missing; calls stand in marks")
        if join is not None:
            raise ValueError(f"{scope}.join: calls are not joined")
        body = body_form(content, arguments, scope)
        groups = [*opener.pattern.program.names, *(closer.pattern.program.names if closer else ())]
        shape = shape_of(field.get("transform"), field.get("transform_each", False), groups, scope)
        return Field(name, opener, closer, True, "", body, shape)
    if content != "text":
        raise ValueError(f"{scope}.content: {content!r}; {name} is text")
    if field.get("transform") is not None:
        raise ValueError(f"{scope}.transform: {name} is sent as it is written")
    if flag_of(field, "repeats", False, scope) and join is None:
        raise ValueError(f"{scope}.repeats: a list of texts; give it a join")
    _only(arguments, frozenset({"strip"}), f"{scope}.content_args")
    strip = flag_of(arguments, "strip", True, f"{scope}.content_args")
    return Field(name, opener, closer, strip, join or "", None, None)


def _delimiter(spec: Mapping[str, Any], key: str, scope: str) -> Delimiter | None:
    """Return the mark under `key` (a text, or texts) or `key`_pattern; None if missing, or the end
    of the text.
    """
    texts, source = spec.get(key), spec.get(f"{key}_pattern")
    if key == "close" and texts == END_OF_TEXT:
        return None
    if texts is not None and source is not None:
        raise ValueError(f"{scope}.{key}: there is {key}_pattern, too")
    if source is not None:
        scope = f"{scope}.{key}_pattern"
        if not isinstance(source, str):
            raise ValueError(f"{scope}: is no text")
        try:
            part = regex_program.parse(source)
            left = regex_program.without_end(part) if key == "close" else part
            if left is None:
                return None
            pattern = Pattern(Program(left), MAX_DELIMITER)
        except ValueError as error:
            raise ValueError(f"{scope}: {source!r} is not read: {error}") from None
        return Delimiter(pattern, tuple(regex_program.literals(left)), False)
    if texts is None:
        return None
    marks = [texts] if isinstance(texts, str) else texts
    if (
        not isinstance(marks, list)
        or not all(isinstance(mark, str) and 0 < len(mark) <= MAX_DELIMITER for mark in marks)
        or not 0 < len(marks) <= MAX_FIELDS
    ):
        raise ValueError(
            f"{scope}.{key}: is neither a text nor a list of texts, of 1 to {MAX_DELIMITER} "
            "characters each"
        )
    longest_first = sorted(dict.fromkeys(marks), key=len, reverse=True)
    try:
        options: list[regex_program.Part] = [regex_program.literal(m) for m in longest_first]
        pattern = Pattern(Program(regex_program.Choice(options)), MAX_DELIMITER)
    except ValueError as error:
        raise ValueError(f"{scope}.{key}: {error}") from None
    return Delimiter(pattern, tuple(marks), True)


def _object(value: Any, scope: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{scope}: is no object")
    return value


def _only(value: Mapping[str, Any], keys: frozenset[str], scope: str) -> None:
    for key in value:
        if key not in keys:
            raise ValueError(f"{scope}.{key}: is not read (it has {', '.join(sorted(keys))})")


ALL_CONTENT = read_template({"start_anchor": "\n", "fields": {CONTENT: {}}})
"""Reads all text as content, without a checkpoint's template."""
