"""From how a family writes calls, and a request's tools, to the structural tag that holds them.

What is made here are formats of structural tags (`{"format": …}`): `const_string`, `regex`,
`any_text`, `json_schema`, `sequence`, `or`, `optional`, `star`, `tag`, `triggered_tags`,
`tags_with_separator`, as xgrammar names them, with three keys more. Free text and expressions may
have `excludes`: texts that are nowhere in what they match; `never`: an expression that is nowhere
in it; `never_first`: one that it does not begin with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..protocols import ArgumentForm, CallForm
from .call_arguments import arguments_format

_NAME = re.compile(r"[\w.\-]+")
NUMBER = "[0-9]{1,4}"


class HeldTool(msgspec.Struct, frozen=True):
    """A tool that may be called."""

    name: str
    schema: Mapping[str, Any]
    """Of its parameters: an object."""
    strict: bool = True
    """Off: any arguments will do."""


def forms_of(parser: Any) -> tuple[CallForm, ...]:
    """What a tool parser (a class, or None) says about how its family writes calls."""
    form = getattr(parser, "call_form", ())
    return (form,) if isinstance(form, CallForm) else tuple(form)


def forced(
    forms: Sequence[CallForm], tools: Sequence[HeldTool], *, parallel: bool
) -> dict[str, Any]:
    """Calls and nothing else.

    Raises ValueError with what the family's form has no way to hold.
    """
    return _tag(_either([_calls(form, tools, parallel=parallel) for form in forms]))


def free(forms: Sequence[CallForm], tools: Sequence[HeldTool], *, parallel: bool) -> dict[str, Any]:
    """Any text, or calls, or text and then calls. Raises ValueError as `forced` does."""
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


def calls_or_schema(
    forms: Sequence[CallForm], tools: Sequence[HeldTool], schema: Any, *, parallel: bool
) -> dict[str, Any]:
    """Calls, or a JSON text that follows `schema`. Raises ValueError as `forced` does."""
    calls = [_calls(form, tools, parallel=parallel) for form in forms]
    return _tag(_either([*calls, {"type": "json_schema", "json_schema": schema}]))


def _tag(format: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


def _either(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _calls(form: CallForm, tools: Sequence[HeldTool], *, parallel: bool) -> dict[str, Any]:
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(form, tool) for tool in tools],
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return {"type": "tag", "begin": form.open, "content": calls, "end": form.close}


def _call(form: CallForm, tool: HeldTool) -> dict[str, Any]:
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


def _arguments(form: ArgumentForm | None, tool: HeldTool) -> dict[str, Any]:
    if form is None:
        schema = tool.schema if tool.strict else {"type": "object"}
        return {"type": "json_schema", "json_schema": dict(schema)}
    try:
        return arguments_format(form, tool.schema if tool.strict else None)
    except ValueError as error:
        raise ValueError(f"{tool.name}: {error}") from None
