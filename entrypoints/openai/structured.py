"""What a request's output must look like: response formats, grammars, and forced tool calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import msgspec

from ...core.config import StructuredOutputsConfig
from ...core.errors import InvalidRequest
from ...core.structured.spec import check_bounds
from ...core.text.forced_calls import CallList, NamedCall
from ...core.types import StructuredOutputsParams, structured_outputs_from

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's older names → kinds."""


class ForcedCalls(msgspec.Struct, frozen=True):
    """A `tool_choice` that leaves no choice."""

    params: StructuredOutputsParams
    parser: Callable[..., Any]
    """Makes a `ToolParser` for one answer."""
    named: bool
    """One function, by name: the answer ends with finish_reason "stop", as at OpenAI's."""


def requested(asked: Any) -> StructuredOutputsParams | None:
    """From `response_format`, `structured_outputs` or a `guided_*` field; at most one of them.

    Raises InvalidRequest with the field's name.
    """
    found: dict[str, StructuredOutputsParams] = {}
    if (made := _from_format(asked.response_format)) is not None:
        found["response_format"] = made
    if asked.structured_outputs is not None:
        found["structured_outputs"] = structured_outputs_from(asked.structured_outputs)
    for name, kind in GUIDED.items():
        if (value := getattr(asked, name)) is not None:
            found[name] = _made(name, kind, value)
    if len(found) > 1:
        raise InvalidRequest(
            f"{' and '.join(found)}: only one of them may be given", param=list(found)[1]
        )
    return next(iter(found.values()), None)


def _from_format(given: dict[str, Any] | None) -> StructuredOutputsParams | None:
    field = "response_format"
    if given is None:
        return None
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return _made(field, "json_object", True)
        case "json_schema":
            wrapped = given.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(
                    "response_format.json_schema: needs an object with schema",
                    param="response_format.json_schema",
                )
            return _made(field, "json", schema)
        case "structural_tag":
            return _made(field, "structural_tag", given)
        case other:
            raise InvalidRequest(
                "response_format.type: must be text, json_object, json_schema or structural_tag, "
                f"got {other!r}",
                param="response_format.type",
            )


def _made(field: str, kind: str, value: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**{kind: value}, field=field)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", param=field) from None


# ---------------------------------------------------------------- tools


def forced_calls(asked: Any, config: StructuredOutputsConfig) -> ForcedCalls | None:
    """For `tool_choice` "required" or a named function. Raises InvalidRequest."""
    choice = asked.tool_choice
    if choice in (None, "auto", "none"):
        return None
    _check_tools(asked.tools, config)
    functions = _functions(asked.tools)
    if choice == "required":
        if not functions:
            raise InvalidRequest("tool_choice: required needs tools", param="tool_choice")
        schema = _list_schema(functions, parallel=asked.parallel_tool_calls is not False)
        return ForcedCalls(_made("tools", "json", schema), CallList, named=False)
    name = _chosen_name(choice)
    if name not in functions:
        raise InvalidRequest(
            f"tool_choice: {name!r} is none of tools ({', '.join(functions) or 'there are none'})",
            param="tool_choice",
        )
    schema = _parameters(functions[name])
    parser = functools.partial(NamedCall, name)
    return ForcedCalls(_made("tools", "json", schema), parser, named=True)


def strict_calls(
    asked: Any, parser: Any, config: StructuredOutputsConfig
) -> StructuredOutputsParams | None:
    """A grammar for calls that the model makes by itself, when a tool is `strict`: what the family
    writes around a call, with the tool's schema between. None where nothing is asked for, or the
    tool parser (a class) does not say what its family writes (`call_form`)."""
    form: tuple[str, str, str] | None = getattr(parser, "call_form", None)
    functions = _functions(asked.tools)
    if form is None or not any(function.get("strict") for function in functions.values()):
        return None
    _check_tools(asked.tools, config)
    trigger, begin, end = form
    structures = [
        {
            "begin": begin.replace("{name}", json.dumps(name, ensure_ascii=False)[1:-1]),
            "schema": _parameters(function) if function.get("strict") else {"type": "object"},
            "end": end,
        }
        for name, function in functions.items()
    ]
    tag: dict[str, Any] = {"structures": structures, "triggers": [trigger]}
    if asked.parallel_tool_calls is False:
        tag["stop_after_first"] = True
    return _made("tools", "structural_tag", tag)


def _check_tools(tools: Any, config: StructuredOutputsConfig) -> None:
    check_bounds(msgspec.json.encode(tools).decode(), "tools", config)


def _functions(tools: Any) -> dict[str, dict[str, Any]]:
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            field = f"tools[{index}].function"
            raise InvalidRequest(f"{field}: must be an object with a name", param=field)
        if not isinstance(function.get("parameters"), dict | None):
            field = f"tools[{index}].function.parameters"
            raise InvalidRequest(f"{field}: must be a JSON schema", param=field)
        functions[function["name"]] = function
    return functions


def _chosen_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            'tool_choice: must be none, auto, required or {"type": "function", "function": '
            '{"name": …}}',
            param="tool_choice",
        )
    return str(function["name"])


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", **(function.get("parameters") or {})}


def _list_schema(functions: dict[str, dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """`[{"name": …, "parameters": …}, …]`, one call at least. Each tool's schema moves, whole, to
    the top's `$defs`, and its references with it."""
    calls, definitions = [], {}
    for index, (name, function) in enumerate(functions.items()):
        place = f"#/$defs/parameters_{index}"
        definitions[f"parameters_{index}"] = _moved(_parameters(function), place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": definitions,
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _moved(schema: Any, place: str) -> Any:
    """A copy whose references to itself fit its new place."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
