"""Tools defined by OpenAI and run by the client: functions whose calls become items of their own
type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Fields = dict[str, Any]
Conversion = Callable[[Fields], Fields]


class ClientTool(msgspec.Struct, frozen=True):
    call: str
    """Type of a call's item."""
    description: str
    parameters: dict[str, Any]
    is_offered: Callable[[dict[str, Any]], bool]
    """Whether the client runs the tool, by its entry in `tools`."""
    fields: Conversion
    """Arguments → fields of the call's item."""
    arguments: Conversion
    """Item → arguments."""


def _object(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _run_here(tool: dict[str, Any]) -> bool:
    """Return whether a shell is the client's, not a container's."""
    environment = tool.get("environment")
    return environment is None or (
        isinstance(environment, dict) and environment.get("type") == "local"
    )


def _nested(key: str, always: Fields | None = None, **empty: Any) -> tuple[Conversion, Conversion]:
    """Return both conversions for an item with arguments under a key.

    always: other fields; empty: values until the arguments are complete.
    """
    fixed = always or {}

    def arguments(item: Fields) -> Fields:
        value = item.get(key)
        if not isinstance(value, dict):
            return {}
        return {k: v for k, v in value.items() if v not in (None, {}) and fixed.get(k) != v}

    return lambda arguments: {key: {**fixed, **(arguments or empty)}}, arguments


_TEXTS = {"type": "array", "items": {"type": "string"}}
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_LOCAL_SHELL = _nested("action", {"type": "exec", "env": {}}, command=[])
_SHELL = _nested("action", {"timeout_ms": None, "max_output_length": None}, commands=[])
_PATCH = _nested("operation", type="update_file", path="", diff="")
_SEARCH = _nested("arguments")

CLIENT_TOOLS = {
    "local_shell": ClientTool(
        "local_shell_call",
        "Runs a command on the user's machine and returns its output.",
        _object("command", command=_TEXTS, working_directory=_TEXT, timeout_ms=_NUMBER),
        lambda _: True,
        *_LOCAL_SHELL,
    ),
    "shell": ClientTool(
        "shell_call",
        "Runs shell commands on the user's machine, in order, and returns their output.",
        _object("commands", commands=_TEXTS, timeout_ms=_NUMBER, max_output_length=_NUMBER),
        _run_here,
        *_SHELL,
    ),
    "apply_patch": ClientTool(
        "apply_patch_call",
        "Creates, updates or deletes a file. The diff is in V4A form: lines that begin with a "
        "space, + or -, after @@ with a line of their surroundings.",
        _object(
            "type path",
            type={"enum": ["create_file", "update_file", "delete_file"]}, path=_TEXT, diff=_TEXT,
        ),
        lambda _: True,
        *_PATCH,
    ),
    "tool_search": ClientTool(
        "tool_search_call",
        "Searches for tools that may be called next.",
        _object("query", query=_TEXT),
        lambda tool: tool.get("execution") == "client",
        lambda arguments: {**_SEARCH[0](arguments), "execution": "client"},
        _SEARCH[1],
    ),
}  # fmt: skip
"""Type of a tool → how it is offered. Other tools run on OpenAI's servers only."""
TOOL_OF_CALL = {tool.call: name for name, tool in CLIENT_TOOLS.items()}
"""Type of a call's item → type of the tool, which is the function's name."""
