"""Grammars of tool calls: required ones, those of strict tools, and those that may replace a
`response_format`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from ....core.config import StructuredOutputsConfig
from ....core.errors import InvalidRequest, listed, shown
from ....core.grammars.schemas.json_schemas import adapted, log_unchecked
from ....core.grammars.spec import check_bounds
from ....core.grammars.tool_calls.call_arguments import moved
from ....core.grammars.tool_calls.call_format import (
    CallableTool,
    calls_or_schema_tag,
    forms_of,
    optional_tag,
    required_tag,
)
from ....core.output_parsing.constrained_calls import CallList, CallsOrText, NamedCall
from ....core.sampling_params import StructuredOutputsParams
from ..common.response_format import made
from .tools import ChatTools

logger = logging.getLogger("jackfield.server")


class ConstrainedCalls(msgspec.Struct, frozen=True):
    """A grammar with tool calls, and its outputs' parser."""

    params: StructuredOutputsParams
    parser: Callable[..., Any]
    named: bool = False
    """Whether `tool_choice` names a function: finish_reason is then "stop", as in OpenAI's API."""
    required: bool = False
    """Whether the output is only calls: other text is a cut-off call's markup."""


def constrained_calls(
    tools: ChatTools,
    parser: Any,
    config: StructuredOutputsConfig,
    format: StructuredOutputsParams | None,
) -> ConstrainedCalls | None:
    """Return the tool calls' grammar, if needed; it replaces `format`, whose schema it contains.

    parser: the tool parser's class. Raises InvalidRequest.
    """
    if (calls := _required_calls(tools, parser, config)) is not None:
        return calls
    if not tools.offered:
        return None
    if parser is None:
        raise InvalidRequest(
            "tools: this server has no tool-call parser; start it with --tool-call-parser",
            param="tools",
        )
    return _voluntary_calls(tools, parser, config, format)


def _required_calls(
    tools: ChatTools, parser: Any, config: StructuredOutputsConfig
) -> ConstrainedCalls | None:
    """Return the grammar for `tool_choice` "required" or a named function, else None.

    It has the tool parser's form, or JSON without a parser, if the form cannot express these tools,
    or with a named backend, which may not support it. Raises InvalidRequest.
    """
    choice = tools.choice
    if choice in (None, "auto", "none"):
        return None
    _check(tools, config)
    functions = _functions(tools)
    named = choice != "required"
    if named:
        name = _chosen_name(choice)
        if name not in functions:
            names = listed(functions) or "there are none"
            raise InvalidRequest(
                f"tool_choice: {shown(name)} is none of tools ({names})", param="tool_choice"
            )
        functions = {name: functions[name]}
    elif not functions:
        raise InvalidRequest("tool_choice: required needs tools", param="tool_choice")
    parallel = not named and tools.parallel
    schemas = _schemas(functions)
    if config.backend == "auto" and (forms := forms_of(parser)):
        callables = [CallableTool(name, schema) for name, schema in schemas.items()]
        try:
            tag = required_tag(forms, callables, parallel=parallel)
        except ValueError:
            pass
        else:
            params = made("tools", "structural_tag", tag)
            return ConstrainedCalls(params, parser, named, required=True)
    if named:
        return ConstrainedCalls(
            made("tools", "json", schemas[name]),
            functools.partial(NamedCall, name),
            named=True,
            required=True,
        )
    return ConstrainedCalls(
        made("tools", "json", _list_schema(schemas, parallel=parallel)), CallList, required=True
    )


def _voluntary_calls(
    tools: ChatTools,
    parser: Any,
    config: StructuredOutputsConfig,
    format: StructuredOutputsParams | None,
) -> ConstrainedCalls | None:
    """Return the grammar for optional calls, if a tool is `strict` or the output follows a schema
    (`format`); None without need, or if no grammar can express it.

    Raises InvalidRequest if a tool is strict and `parser` has no form for it.
    """
    functions = _functions(tools)
    strict_names = [name for name, function in functions.items() if function.get("strict")]
    strict = [name for name in functions if name in strict_names or name in tools.schemas]
    schema = _schema_of(format)
    if format is not None and schema is None:
        return None
    if (schema is None and not strict) or (schema is not None and config.backend != "auto"):
        return None  # If a backend was named, it may not support the form.
    _check(tools, config)
    if format is not None:
        check_bounds(msgspec.json.encode(schema).decode(), "response_format", config)
        schema = _adapted(schema, "response_format", strict=bool(format.strict))
    forms = forms_of(parser)
    schemas = _schemas({name: functions[name] for name in strict})
    callables = [CallableTool(name, schemas.get(name, {}), name in strict) for name in functions]
    try:
        if not forms:
            raise ValueError("its tool parser does not say how calls are written (call_form)")
        if schema is None:
            tag = optional_tag(forms, callables, parallel=tools.parallel)
            return ConstrainedCalls(made("tools", "structural_tag", tag), parser)
        tag = calls_or_schema_tag(forms, callables, schema, parallel=tools.parallel)
    except ValueError as error:
        if schema is not None:
            return None
        if not strict_names:
            logger.warning("tools: the format of custom tools is not enforced: %s", error)
            return None
        raise InvalidRequest(
            f"tools: strict cannot be enforced in this model's calls: {error}; leave it out, "
            "or force a call with tool_choice",
            param="tools",
        ) from None
    opens = tuple(form.open for form in forms)
    return ConstrainedCalls(
        made("response_format", "structural_tag", tag), CallsOrText.of(parser, opens)
    )


def _schema_of(format: StructuredOutputsParams | None) -> Any:
    """Return a `response_format`'s JSON schema, or None."""
    if format is None or format.field != "response_format":
        return None
    if format.json_object:
        return {"type": "object"}
    return format.json


def _check(tools: ChatTools, config: StructuredOutputsConfig) -> None:
    check_bounds(msgspec.json.encode(tools.definitions).decode(), "tools", config)


def _functions(tools: ChatTools) -> dict[str, dict[str, Any]]:
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools.definitions):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            field = f"tools[{index}].function"
            raise InvalidRequest(f"{field}: must be an object with a name", param=field)
        if not isinstance(function.get("parameters"), dict | None):
            field = f"tools[{index}].function.parameters"
            raise InvalidRequest(f"{field}: must be a JSON schema", param=field)
        if (enforced := tools.schemas.get(function["name"])) is not None:
            function = {**function, "parameters": enforced}
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
    """Return each function's parameter schema, adapted for backends.

    Raises InvalidRequest unless it is an object's.
    """
    schemas: dict[str, dict[str, Any]] = {}
    for name, function in functions.items():
        parameters = function.get("parameters") or {}
        kind = parameters.get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise InvalidRequest(
                f"tools: the parameters of {shown(name)} must have the type object, "
                f"got {shown(kind)}",
                param="tools",
            )
        schemas[name] = _adapted(
            {**parameters, "type": "object"}, "tools", strict=bool(function.get("strict"))
        )
    return schemas


def _adapted(schema: Any, field: str, *, strict: bool) -> Any:
    """Return an adapted copy. Raises InvalidRequest with `field`."""
    copy = msgspec.json.decode(msgspec.json.encode(schema))
    try:
        schema, unchecked = adapted(copy, strict=strict)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None
    log_unchecked(unchecked)
    return schema


def _list_schema(schemas: dict[str, dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """Return the schema of `[{"name": …, "parameters": …}, …]` with at least one call.

    Tools' schemas move to the top's `$defs`.
    """
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
