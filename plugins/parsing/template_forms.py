"""How a response template reads calls, and finds names and arguments.

The text is JSON, tags or lines; a transform places name and arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from . import regex_program
from .regex_program import Program
from .regex_search import Pattern

PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_MAX_DEPTH = 16
"""Deepest transform."""


class JsonForm(NamedTuple):
    """JSON, or similar text of some models."""

    unquoted_keys: bool = False
    delimiters: tuple[tuple[str, str], ...] = ()
    """Marks around unescaped strings."""
    allow_non_json: bool = False
    """Whether other text is a value itself."""


class ScalarForm(NamedTuple):
    kind: str = "text"
    """text, int, float or bool."""
    strip: bool = True


ValueForm: TypeAlias = JsonForm | ScalarForm


class TagsForm(NamedTuple):
    """Tags with a key and a value; other text is dropped."""

    tag: Pattern
    value: ValueForm | None
    """None: text."""
    merge: bool
    """Whether values of a repeated key form a list; otherwise the last counts."""


class LinesForm(NamedTuple):
    """A key and a value per line; other lines are dropped."""

    line_separator: str
    separator: str
    strip: bool
    value: ValueForm | None


BodyForm: TypeAlias = JsonForm | ScalarForm | TagsForm | LinesForm


class Shape(NamedTuple):
    """A transform: JSON in which texts `{name}` and `{content.key}` are placeholders."""

    transform: Any
    each: bool
    """Whether it applies to each object of a list."""


def body_form(name: Any, arguments: Mapping[str, Any], scope: str) -> BodyForm:
    """Check a template's form of calls. Raises ValueError with the field's name."""
    if name == "xml-inline":
        return _tags_form(arguments, f"{scope}.content_args")
    if name == "kv-lines":
        _only(arguments, ("line_sep", "kv_sep", "strip", "value_parser"), f"{scope}.content_args")
        separators = [arguments.get("line_sep", "\n"), arguments.get("kv_sep", ":")]
        for key, separator in zip(("line_sep", "kv_sep"), separators, strict=True):
            if not isinstance(separator, str) or not separator:
                raise ValueError(f"{scope}.content_args.{key}: is no text")
        value = _value_parser(arguments, f"{scope}.content_args")
        strip = flag_of(arguments, "strip", True, f"{scope}.content_args")
        return LinesForm(separators[0], separators[1], strip, value)
    form = _value_form(name, arguments, scope)
    if isinstance(form, ScalarForm) and form.kind != "text":
        raise ValueError(f"{scope}.content: {name!r} is no call")
    return form


def _tags_form(arguments: Mapping[str, Any], scope: str) -> TagsForm:
    _only(arguments, ("tag_pattern", "value_parser", "merge_duplicates"), scope)
    source = arguments.get("tag_pattern")
    if not isinstance(source, str):
        raise ValueError(f"{scope}.tag_pattern: is missing")
    try:
        program = Program(regex_program.parse(source))
        if not {"key", "value"} <= set(program.names):
            raise ValueError("it needs groups named key and value")
    except ValueError as error:
        raise ValueError(f"{scope}.tag_pattern: {source!r} is not read: {error}") from None
    merge = flag_of(arguments, "merge_duplicates", False, scope)
    return TagsForm(Pattern(program), _value_parser(arguments, scope), merge)


def _value_parser(arguments: Mapping[str, Any], scope: str) -> ValueForm | None:
    spec = arguments.get("value_parser")
    if spec is None:
        return None
    scope = f"{scope}.value_parser"
    if not isinstance(spec, Mapping):
        raise ValueError(f"{scope}: is no object")
    _only(spec, ("name", "args"), scope)
    inner = spec.get("args", {})
    if not isinstance(inner, Mapping):
        raise ValueError(f"{scope}.args: is no object")
    return _value_form(spec.get("name", "text"), inner, scope)


def _value_form(name: Any, arguments: Mapping[str, Any], scope: str) -> ValueForm:
    if name == "json":
        _only(arguments, ("unquoted_keys", "string_delims", "allow_non_json"), f"{scope}.args")
        pairs = arguments.get("string_delims", [])
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(m, str) and m for m in pair)
            for pair in pairs
        ):
            raise ValueError(f"{scope}: string_delims is no list of pairs of texts")
        return JsonForm(
            flag_of(arguments, "unquoted_keys", False, f"{scope}.args"),
            tuple((pair[0], pair[1]) for pair in pairs),
            flag_of(arguments, "allow_non_json", False, f"{scope}.args"),
        )
    if name in ("text", "int", "float", "bool"):
        _only(arguments, ("strip",), f"{scope}.args")
        return ScalarForm(name, flag_of(arguments, "strip", True, f"{scope}.args"))
    raise ValueError(f"{scope}: values are read as text, int, float, bool or json, not {name!r}")


def flag_of(arguments: Mapping[str, Any], key: str, default: bool, scope: str) -> bool:
    """Return an option; null is the default. Raises ValueError with its name."""
    value = arguments.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{scope}.{key}: is no boolean")
    return value


def shape_of(transform: Any, each: Any, groups: Sequence[str], scope: str) -> Shape | None:
    """Check the transform of calls. Raises ValueError with the field's name."""
    if not isinstance(each, bool):
        raise ValueError(f"{scope}.transform_each: is no boolean")
    if transform is None:
        if each or groups:
            needs = "transform_each" if each else f"the group {groups[0]!r}"
            raise ValueError(f"{scope}.transform: is missing, and {needs} needs one")
        return None
    for path in _placeholders(transform, f"{scope}.transform", 0):
        root = path.split(".")[0]
        if not each and root not in ("content", *groups):
            names = ", ".join(["content", *groups])
            raise ValueError(f"{scope}.transform: {{{path}}} is unknown (there are: {names})")
    inner = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if isinstance(inner, Mapping) and "name" not in inner:
        raise ValueError(f"{scope}.transform: the call has no name")
    if not isinstance(inner, Mapping) and not (isinstance(inner, str) and "{" in inner):
        raise ValueError(f"{scope}.transform: is no call")
    return Shape(transform, each)


def _placeholders(transform: Any, scope: str, depth: int) -> list[str]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{scope}: nested more than {_MAX_DEPTH} deep")
    if isinstance(transform, Mapping | list):
        inner = transform.values() if isinstance(transform, Mapping) else transform
        return [path for value in inner for path in _placeholders(value, scope, depth + 1)]
    if not isinstance(transform, str) or not (match := PLACEHOLDER.search(transform)):
        return []
    if match[0] != transform:
        raise ValueError(f"{scope}: {transform!r} is more than a placeholder")
    return [match[1]]


def _only(value: Mapping[str, Any], keys: Sequence[str], scope: str) -> None:
    for key in value:
        if key not in keys:
            raise ValueError(f"{scope}.{key}: is not read (it has {', '.join(keys)})")
