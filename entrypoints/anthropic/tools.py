"""Converts Anthropic's tools and `tool_choice` to a chat's."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from ...core.errors import InvalidRequest, shown

logger = logging.getLogger("jackfield.server")
Tools = list[dict[str, Any]]
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_EDITS: dict[str, Any] = {
    "path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER,
    "insert_text": _TEXT, "view_range": {"type": "array", "items": _NUMBER},
}  # fmt: skip


def _command(*commands: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"command": {"enum": list(commands)}, **properties},
        "required": ["command"],
    }


CLIENT_TOOLS: dict[str, dict[str, Any]] = {
    "bash": {
        "description": "Runs a command in a shell that keeps its state; restart begins a new one.",
        "input_schema": {
            "type": "object",
            "properties": {"command": _TEXT, "restart": {"type": "boolean"}},
        },
    },
    "text_editor": {
        "description": "Views, creates and edits files.",
        "input_schema": _command("view", "create", "str_replace", "insert", **_EDITS),
    },
    "memory": {
        "description": "Views, creates, edits and deletes files under /memories.",
        "input_schema": _command(
            "view", "create", "str_replace", "insert", "delete", "rename",
            **_EDITS, old_path=_TEXT, new_path=_TEXT,
        ),
    },
}  # fmt: skip
"""Tools defined by Anthropic and run by the client, by type without its date."""


def chat_tools(tools: list[Any] | None) -> Tools | None:
    """Return the client's tools, as a chat's; logs and omits those of Anthropic's servers.

    Raises InvalidRequest with the field's path.
    """
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    return [function for function in functions if function is not None] or None


def _function(tool: Any, path: str) -> dict[str, Any] | None:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{path}: must be an object", param=path)
    kind = tool.get("type")
    if not isinstance(kind, str | None):
        raise InvalidRequest(f"{path}.type: must be a text", param=f"{path}.type")
    if kind not in (None, "custom"):
        family = next((name for name in CLIENT_TOOLS if _is_version(kind, name)), None)
        if family is not None:
            tool = {**CLIENT_TOOLS[family], **tool}
        elif "input_schema" not in tool:
            log_left_out(shown(kind))
            return None
    checks = (
        ("name", isinstance(tool.get("name"), str) and bool(tool["name"]), "a non-empty text"),
        ("description", isinstance(tool.get("description"), str | None), "a text"),
        ("input_schema", isinstance(tool.get("input_schema"), dict), "a JSON schema"),
        ("strict", isinstance(tool.get("strict"), bool | None), "true or false"),
    )
    for name, right, what in checks:
        if not right:
            raise InvalidRequest(f"{path}.{name}: must be {what}", param=f"{path}.{name}")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def chat_choice(
    choice: dict[str, Any] | None, tools: Tools | None
) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return a chat's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    disable_parallel = choice.get("disable_parallel_tool_use")
    if not isinstance(disable_parallel, bool | None):
        field = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequest(f"{field}: must be true or false", param=field)
    parallel = False if disable_parallel else None
    kind = choice.get("type")
    if kind in ("any", "tool") and not tools:
        raise InvalidRequest(f"tool_choice: {kind} needs tools", param="tool_choice")
    match kind:
        case "auto" | "none":
            return kind, parallel
        case "any":
            return "required", parallel
        case "tool":
            if not isinstance(choice.get("name"), str):
                raise InvalidRequest("tool_choice.name: must be a text", param="tool_choice.name")
            return {"type": "function", "function": {"name": choice["name"]}}, parallel
    raise InvalidRequest(
        f"tool_choice.type: must be auto, any, tool or none, got {shown(kind)}",
        param="tool_choice.type",
    )


def _is_version(kind: str, name: str) -> bool:
    return re.fullmatch(rf"{name}_[0-9]{{8}}", kind) is not None


@functools.lru_cache(maxsize=64)
def log_left_out(kind: str) -> None:
    logger.warning("tools: those of type %s are run by Anthropic's servers: left out", kind)
