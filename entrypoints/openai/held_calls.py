"""Tool calls that a grammar holds: forced, of strict tools, or beside a schema for the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from ...core.config import StructuredOutputsConfig
from ...core.errors import InvalidRequest
from ...core.structured.call_arguments import moved
from ...core.structured.call_format import HeldTool, calls_or_schema, forced, forms_of, free
from ...core.structured.schemas import adapted, log_unchecked
from ...core.structured.spec import check_bounds
from ...core.text.forced_calls import CallList, CallsOrText, NamedCall
from ...core.types import StructuredOutputsParams
from .structured import made


class HeldCalls(msgspec.Struct, frozen=True):
    """A grammar with tool calls in it, and how they are read back."""

    params: StructuredOutputsParams
    parser: Callable[..., Any]
    """Makes a `ToolParser` for one answer."""
    named: bool = False
    """One function, by name: the answer ends with finish_reason "stop", as at OpenAI's."""


def forced_calls(asked: Any, parser: Any, config: StructuredOutputsConfig) -> HeldCalls | None:
    """For `tool_choice` "required" or a named function, else None.

    The calls are in the form of the tool parser's family. They are JSON where there is no parser
    (None), its form has no way to hold these tools, or a backend was named, which may not know the
    form. Raises InvalidRequest.
    """
    choice = asked.tool_choice
    if choice in (None, "auto", "none"):
        return None
    _check(asked.tools, config)
    functions = _functions(asked.tools)
    named = choice != "required"
    if named:
        name = _chosen_name(choice)
        if name not in functions:
            there = ", ".join(functions) or "there are none"
            raise InvalidRequest(
                f"tool_choice: {name!r} is none of tools ({there})", param="tool_choice"
            )
        functions = {name: functions[name]}
    elif not functions:
        raise InvalidRequest("tool_choice: required needs tools", param="tool_choice")
    parallel = not named and asked.parallel_tool_calls is not False
    schemas = _schemas(functions)
    if config.backend == "auto" and (forms := forms_of(parser)):
        tools = [HeldTool(name, schema) for name, schema in schemas.items()]
        try:
            tag = forced(forms, tools, parallel=parallel)
        except ValueError:
            pass
        else:
            return HeldCalls(made("tools", "structural_tag", tag), parser, named)
    if named:
        return HeldCalls(
            made("tools", "json", schemas[name]), functools.partial(NamedCall, name), named=True
        )
    return HeldCalls(made("tools", "json", _list_schema(schemas, parallel=parallel)), CallList)


def free_calls(
    asked: Any, parser: Any, config: StructuredOutputsConfig, format: StructuredOutputsParams | None
) -> HeldCalls | None:
    """For calls that the model makes by itself: where a tool is `strict`, or the answer follows a
    schema (`format`) otherwise. None: there is nothing to hold calls to, or no way to.

    Raises InvalidRequest where a tool is strict and the parser (a class) cannot hold it.
    """
    functions = _functions(asked.tools)
    strict = [name for name, function in functions.items() if function.get("strict")]
    schema = _schema_of(format)
    if format is not None and schema is None:
        return None
    if (schema is None and not strict) or (schema is not None and config.backend != "auto"):
        return None  # A backend that was named may not know the form.
    _check(asked.tools, config)
    if format is not None:
        check_bounds(msgspec.json.encode(schema).decode(), "response_format", config)
        schema = _adapted(schema, "response_format", strict=bool(format.strict))
    forms = forms_of(parser)
    schemas = _schemas({name: functions[name] for name in strict})
    tools = [HeldTool(name, schemas.get(name, {}), name in strict) for name in functions]
    parallel = asked.parallel_tool_calls is not False
    try:
        if not forms:
            raise ValueError("its tool parser does not say how calls are written (call_form)")
        if schema is None:
            tag = free(forms, tools, parallel=parallel)
            return HeldCalls(made("tools", "structural_tag", tag), parser)
        tag = calls_or_schema(forms, tools, schema, parallel=parallel)
    except ValueError as error:
        if schema is not None:
            return None
        raise InvalidRequest(
            f"tools: strict is more than this model's calls can be held to: {error}; leave it out, "
            "or force a call with tool_choice",
            param="tools",
        ) from None
    opens = tuple(form.open for form in forms)
    return HeldCalls(made("response_format", "structural_tag", tag), CallsOrText.of(parser, opens))


def _schema_of(format: StructuredOutputsParams | None) -> Any:
    """The schema that a `response_format` asks for; None: it asks for none, or for another kind."""
    if format is None or format.field != "response_format":
        return None
    if format.json_object:
        return {"type": "object"}
    return format.json


def _check(tools: Any, config: StructuredOutputsConfig) -> None:
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


def _schemas(functions: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name → the schema of its parameters, in words that grammars know (`adapted`)."""
    return {
        name: _adapted(
            {"type": "object", **(function.get("parameters") or {})},
            "tools",
            strict=bool(function.get("strict")),
        )
        for name, function in functions.items()
    }


def _adapted(schema: Any, field: str, *, strict: bool) -> Any:
    """A copy. Raises InvalidRequest about `field`."""
    copy = msgspec.json.decode(msgspec.json.encode(schema))
    try:
        schema, unchecked = adapted(copy, strict=strict)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None
    log_unchecked(unchecked)
    return schema


def _list_schema(schemas: dict[str, dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """`[{"name": …, "parameters": …}, …]`, one call at least. Each tool's schema moves, whole, to
    the top's `$defs`, and its references with it."""
    calls, definitions = [], {}
    for index, (name, parameters) in enumerate(schemas.items()):
        place = f"#/$defs/parameters_{index}"
        definitions[f"parameters_{index}"] = moved(parameters, place)
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
