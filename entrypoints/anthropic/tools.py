"""Converts Anthropic's tools and `tool_choice` to a chat's."""

from __future__ import annotations

from typing import Any

from ...core.errors import InvalidRequest, shown

Tools = list[dict[str, Any]]


def chat_tools(tools: list[Any] | None) -> Tools | None:
    """Return the client's own tools. Tools that Anthropic runs or defines are refused by their
    type.

    Raises InvalidRequest with the field's path.
    """
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())] or None


def _function(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{path}: must be an object", param=path)
    if (kind := tool.get("type")) not in (None, "custom"):
        raise InvalidRequest(
            f"{path}.type: {shown(kind)} tools are not defined here; describe the tool by name, "
            "description and input_schema",
            param=f"{path}.type",
        )
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
    """Return a chat's `tool_choice` and `parallel_tool_calls`. Raises InvalidRequest."""
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
