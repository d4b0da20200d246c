"""A chat request's tools, and restrictions on calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ....core.errors import InvalidRequest, listed, shown
from ....core.protocols.parsers import ParserEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from ....core.text.chat_messages import check_tool
from ..common.protocol import ChatRequest


class ChatTools(msgspec.Struct, frozen=True):
    """The functions that the model may call, and how."""

    definitions: list[dict[str, Any]]
    """Functions in OpenAI's form, for chat template and tool parser."""
    choice: str | dict[str, Any] | None
    """none, auto (also None), required, or a function in OpenAI's form."""
    parallel: bool
    schemas: Mapping[str, Any]
    """Function → schema of its calls, if stricter than its parameters."""

    @property
    def offered(self) -> bool:
        return bool(self.definitions) and self.choice != "none"


def read_tools(request: ChatRequest, schemas: Mapping[str, Any]) -> ChatTools:
    """Return a request's tools, restricted by `{"type": "allowed_tools", …}`.

    Raises InvalidRequest for tools that are not functions, and a wrong `tool_choice`.
    """
    definitions, choice = request.tools or [], request.tool_choice
    for index, tool in enumerate(definitions):
        check_tool(tool, f"tools[{index}]")
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InvalidRequest(
            f"tool_choice: must be none, auto, required or a function, got {shown(choice)}",
            param="tool_choice",
        )
    if isinstance(choice, dict):
        kind = choice.get("type", "function")
        if kind == "allowed_tools":
            definitions, choice = _allowed(definitions, choice.get("allowed_tools"))
        elif kind != "function":
            raise InvalidRequest(
                f"tool_choice.type: must be function or allowed_tools, got {shown(kind)}",
                param="tool_choice.type",
            )
    return ChatTools(definitions, choice, request.parallel_tool_calls is not False, schemas)


def _allowed(definitions: list[dict[str, Any]], subset: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the allowed tools, and their mode as a plain `tool_choice`."""
    field = "tool_choice.allowed_tools"
    tools = subset.get("tools") if isinstance(subset, dict) else None
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{field}: needs mode and tools", param=field)
    mode = subset.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidRequest(
            f"{field}.mode: must be auto or required, got {shown(mode)}", param=f"{field}.mode"
        )
    defined = {_name(tool) for tool in definitions}
    names = {_name(tool) for tool in tools}
    for name in names - defined:
        raise InvalidRequest(
            f"{field}.tools: {shown(name)} is none of tools "
            f"({listed(sorted(filter(None, defined))) or 'there are none'})",
            param=f"{field}.tools",
        )
    return [tool for tool in definitions if _name(tool) in names], mode


def first_call_only(events: list[ParserEvent]) -> list[ParserEvent]:
    """Drop the events of later calls."""
    return [
        event
        for event in events
        if not isinstance(event, ToolCallStart | ToolCallArguments | ToolCallEnd)
        or event.index == 0
    ]


def _name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
