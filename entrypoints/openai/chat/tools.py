"""Restrictions on tools: OpenAI's `allowed_tools`, and at most one call."""

from __future__ import annotations

from typing import Any

from ....core.errors import InvalidRequest
from ....core.protocols.parsers import ParserEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from ..common.protocol import ChatRequest


def apply_allowed_tools(request: ChatRequest) -> None:
    """Replace `{"type": "allowed_tools", …}` by the tools that it allows and a plain `tool_choice`.

    Raises InvalidRequest with the field's name.
    """
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return
    field = "tool_choice.allowed_tools"
    subset: Any = choice.get("allowed_tools")
    tools = subset.get("tools") if isinstance(subset, dict) else None
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{field}: needs mode and tools", param=field)
    mode = subset.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidRequest(
            f"{field}.mode: must be auto or required, got {mode!r}", param=f"{field}.mode"
        )
    defined = {_name(tool) for tool in request.tools or ()}
    names = {_name(tool) for tool in tools}
    for name in names - defined:
        raise InvalidRequest(
            f"{field}.tools: {name!r} is none of tools "
            f"({', '.join(sorted(filter(None, defined))) or 'there are none'})",
            param=f"{field}.tools",
        )
    request.tools = [tool for tool in request.tools or () if _name(tool) in names]
    request.tool_choice = mode


def check_tools(request: ChatRequest) -> None:
    """Raise InvalidRequest for tools that are not functions, and an unknown `tool_choice`."""
    for index, tool in enumerate(request.tools or ()):
        if tool.get("type", "function") != "function":
            field = f"tools[{index}].type"
            raise InvalidRequest(f"{field}: must be function, got {tool['type']!r}", param=field)
    choice = request.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InvalidRequest(
            f"tool_choice: must be none, auto, required or a function, got {choice!r}",
            param="tool_choice",
        )


def first_call_only(events: list[ParserEvent]) -> list[ParserEvent]:
    """Return the events of the first call, without those of later ones."""
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
