"""Structural tags for tool calls, from a request's tools and a family's form.

Formats are xgrammar's (`{"format": …}`), with three more keys of free text and expressions:
`excludes`: texts not in a match; `never`: an expression not in it; `never_first`: one that it does
not begin with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...protocols.parsers import ArgumentForm, CallForm
from .call_arguments import arguments_format

_NAME = re.compile(r"[\w.\-]+")
NUMBER = "[0-9]{1,4}"


class CallableTool(msgspec.Struct, frozen=True):
    name: str
    schema: Mapping[str, Any]
    strict: bool = True


def forms_of(parser: Any) -> tuple[CallForm, ...]:
    """Return how a tool parser's family (a class, or None) writes calls."""
    form = getattr(parser, "call_form", ())
    return (form,) if isinstance(form, CallForm) else tuple(form)


def required_tag(
    forms: Sequence[CallForm], tools: Sequence[CallableTool], *, parallel: bool
) -> dict[str, Any]:
    """Return a tag for calls only.

    Raises ValueError for what the form cannot express.
    """
    return _tag(_either([_calls(form, tools, parallel=parallel) for form in forms]))


def optional_tag(
    forms: Sequence[CallForm], tools: Sequence[CallableTool], *, parallel: bool
) -> dict[str, Any]:
    """Return a tag for text, calls, or text followed by calls.

    Raises as `required_tag`.
    """
    calls = [_calls(form, tools, parallel=parallel) for form in forms]
    text: dict[str, Any] = {"excludes": sorted({text for form in forms for text in form.never})}
    for key, patterns in (
        ("never", [form.never_pattern for form in forms if form.never_pattern]),
        ("never_first", [form.never_first for form in forms if form.never_first]),
    ):
        if patterns:
            text[key] = "|".join(f"({pattern})" for pattern in patterns)
    if any(form.only_first for form in forms):
        return _tag(_either([*calls, {"type": "any_text", **text}]))
    return _tag(
        {
            "type": "triggered_tags",
            "triggers": sorted({form.trigger for form in forms}),
            "tags": calls,
            "at_least_one": False,
            "stop_after_first": True,
            **text,
        }
    )


def calls_or_schema_tag(
    forms: Sequence[CallForm], tools: Sequence[CallableTool], schema: Any, *, parallel: bool
) -> dict[str, Any]:
    """Return a tag for calls, or JSON that follows `schema`.

    Raises as `required_tag`.
    """
    calls = [_calls(form, tools, parallel=parallel) for form in forms]
    return _tag(_either([*calls, {"type": "json_schema", "json_schema": schema}]))


def _tag(format: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


def _either(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _calls(form: CallForm, tools: Sequence[CallableTool], *, parallel: bool) -> dict[str, Any]:
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(form, tool) for tool in tools],
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return {"type": "tag", "begin": form.open, "content": calls, "end": form.close}


def _call(form: CallForm, tool: CallableTool) -> dict[str, Any]:
    if form.quoted:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
    elif _NAME.fullmatch(tool.name):
        name = tool.name
    else:
        raise ValueError(f"{tool.name!r} is no name that this model's calls can have")
    begin, numbered, rest = form.begin.replace("{name}", name).partition("{number}")
    content = _arguments(form.arguments, tool)
    if numbered:
        parts = [{"type": "regex", "pattern": NUMBER}, {"type": "const_string", "value": rest}]
        content = {"type": "sequence", "elements": [*parts, content]}
    return {"type": "tag", "begin": begin, "content": content, "end": form.end}


def _arguments(form: ArgumentForm | None, tool: CallableTool) -> dict[str, Any]:
    if form is None:
        schema = tool.schema if tool.strict else {"type": "object"}
        return {"type": "json_schema", "json_schema": dict(schema)}
    try:
        return arguments_format(form, tool.schema if tool.strict else None)
    except ValueError as error:
        raise ValueError(f"{tool.name}: {error}") from None
