"""A response's tools, as functions for the model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ....core.errors import InvalidRequest, listed, shown
from .client_tools import CLIENT_TOOLS
from .custom_tools import custom_function

logger = logging.getLogger("jackfield.server")
Choice = str | dict[str, Any] | None


class OfferedTool(msgspec.Struct, frozen=True):
    kind: str
    """function, custom, or one of CLIENT_TOOLS."""
    name: str
    namespace: str | None
    function: dict[str, Any]
    """Its function, named by `flat_name`."""
    schema: dict[str, Any] | None = None
    """Schema enforced in calls, if stricter than the function's parameters."""


NO_TOOL = OfferedTool("function", "", None, {})
"""Stands for the tool of an unknown name."""


class Tools(msgspec.Struct, frozen=True):
    offered: Mapping[str, OfferedTool] = {}
    """By the function's name."""
    left_out: tuple[str, ...] = ()
    """Types of tools that only OpenAI's servers run."""

    @property
    def schemas(self) -> dict[str, Any]:
        """Function → schema enforced in its calls."""
        tools = self.offered.items()
        return {name: tool.schema for name, tool in tools if tool.schema is not None}

    def find(self, name: str) -> OfferedTool:
        tool = self.offered.get(name)
        return msgspec.structs.replace(NO_TOOL, name=name) if tool is None else tool


def flat_name(name: str, namespace: Any = None) -> str:
    """Return the function's name for a tool, maybe in a namespace."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_tools(lists: Iterable[tuple[str, Any]]) -> Tools:
    """Return the tools of several lists with their paths; the last of equal ones counts.

    Raises InvalidRequest with the tool's path.
    """
    offered: dict[str, OfferedTool] = {}
    left_out: dict[str, None] = {}
    for path, tools in lists:
        if not isinstance(tools, list):
            raise InvalidRequest(f"{path}: must be a list of tools", param=path)
        for index, tool in enumerate(tools):
            where = f"{path}[{index}]"
            for item in _read(tool, where):
                if isinstance(item, str):
                    left_out[item] = None
                    continue
                name = item.function["name"]
                same = offered.get(name, item)
                if (same.name, same.namespace) != (item.name, item.namespace):
                    raise InvalidRequest(
                        f"{where}.name: two tools have the name {shown(name)}, one of them by its "
                        "namespace",
                        param=f"{where}.name",
                    )
                offered[name] = item
    for kind in left_out:
        _log_left_out(shown(kind))
    return Tools(offered, tuple(left_out))


def _read(tool: Any, path: str) -> Iterator[OfferedTool | str]:
    """Yield an entry's tools, or the type of one that is not offered."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or not kind:
        raise InvalidRequest(
            f"{path}.type: must be the type of a tool, got {shown(kind)}", param=f"{path}.type"
        )
    if kind == "namespace":
        namespace = _text(tool, "name", path)
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise InvalidRequest(f"{path}.tools: must be a list", param=f"{path}.tools")
        for index, item in enumerate(inner):
            yield _one(item, f"{path}.tools[{index}]", namespace)
    elif kind in ("function", "custom") or (
        kind in CLIENT_TOOLS and CLIENT_TOOLS[kind].is_offered(tool)
    ):
        yield _one(tool, path, None)
    else:
        yield kind


def _one(tool: Any, path: str, namespace: str | None) -> OfferedTool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    schema = None
    if kind in CLIENT_TOOLS and namespace is None:
        name, function = kind, _client_function(tool, path)
    elif kind == "function":
        name, function = _text(tool, "name", path), _function(tool, path)
    elif kind == "custom":
        name = _text(tool, "name", path)
        _check_description(tool, path)
        function, schema = custom_function(tool, path)
    else:
        raise InvalidRequest(
            f"{path}.type: must be function or custom, got {shown(kind)}", param=f"{path}.type"
        )
    function["name"] = flat_name(name, namespace)
    return OfferedTool(kind, name, namespace, function, schema)


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    _check_description(tool, path)
    for name, right, what in (
        ("parameters", isinstance(tool.get("parameters"), dict | None), "a JSON schema"),
        ("strict", isinstance(tool.get("strict"), bool | None), "true or false"),
    ):
        if not right:
            raise InvalidRequest(f"{path}.{name}: must be {what}", param=f"{path}.{name}")
    fields = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in fields if tool.get(name) is not None}


def _client_function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    client_tool = CLIENT_TOOLS[tool["type"]]
    own = _function({k: v for k, v in tool.items() if k in ("description", "parameters")}, path)
    described = {"description": client_tool.description, "parameters": client_tool.parameters}
    return {"name": "", **described, **own}


def _check_description(tool: dict[str, Any], path: str) -> None:
    if not isinstance(tool.get("description"), str | None):
        raise InvalidRequest(f"{path}.description: must be a text", param=f"{path}.description")


def _text(tool: dict[str, Any], name: str, path: str) -> str:
    if not isinstance(tool.get(name), str) or not tool[name]:
        raise InvalidRequest(f"{path}.{name}: must be a non-empty text", param=f"{path}.{name}")
    return str(tool[name])


@functools.lru_cache(maxsize=64)
def _log_left_out(kind: str) -> None:
    logger.warning("tools: those of type %s run on no server but OpenAI's: left out", kind)


# ---------------------------------------------------------------- the choice


def chosen(tools: Tools, choice: Choice) -> tuple[Tools, Choice]:
    """Return the tools that `tool_choice` allows, and the choice in a chat's form.

    Raises InvalidRequest if it is wrong, or needs an omitted tool.
    """
    if isinstance(choice, str | None):
        if choice not in (None, "none", "auto", "required"):
            raise InvalidRequest(
                f"tool_choice: must be none, auto, required or an object, got {shown(choice)}",
                param="tool_choice",
            )
        if choice == "required" and not tools.offered:
            raise InvalidRequest(
                f"tool_choice: required needs tools that can be called here{_without(tools)}",
                param="tool_choice",
            )
        return tools, choice
    if choice.get("type") != "allowed_tools":
        names = _names(choice, tools, "tool_choice")
        if len(names) != 1:
            raise InvalidRequest(
                f"tool_choice.type: must be that of a tool that can be called here, got "
                f"{shown(choice['type'])}",
                param="tool_choice.type",
            )
        return tools, {"type": "function", "function": {"name": names[0]}}
    mode, entries = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest(
            f"tool_choice.mode: must be auto or required, got {shown(mode)}",
            param="tool_choice.mode",
        )
    if not isinstance(entries, list) or not entries:
        raise InvalidRequest(
            "tool_choice.tools: must be a list of tools", param="tool_choice.tools"
        )
    names = [name for entry in entries for name in _names(entry, tools, "tool_choice.tools")]
    if mode == "required" and not names:
        raise InvalidRequest(
            "tool_choice.tools: required needs tools that can be called here",
            param="tool_choice.tools",
        )
    allowed = {name: tools.offered[name] for name in names}
    return Tools(allowed, tools.left_out), mode if names else None


def _names(entry: Any, tools: Tools, path: str) -> list[str]:
    """Return an entry's functions; none if omitted."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(
            f"{path}.type: must be the type of a tool, got {shown(kind)}", param=f"{path}.type"
        )
    if kind == "namespace":
        name = entry.get("name")
        names = [n for n, tool in tools.offered.items() if tool.namespace == name]
    elif kind in CLIENT_TOOLS:
        names = [n for n, tool in tools.offered.items() if tool.kind == kind]
    elif kind in ("function", "custom"):
        if not isinstance(entry.get("name"), str):
            raise InvalidRequest(f"{path}.name: must be a text", param=f"{path}.name")
        name = flat_name(entry["name"], entry.get("namespace"))
        names = [name] if name in tools.offered else []
    else:
        return []
    if not names:
        raise InvalidRequest(
            f"tool_choice: {shown(entry.get('name', kind))} is none of tools "
            f"({listed(tools.offered) or 'there are none'}){_without(tools)}",
            param="tool_choice",
        )
    return names


def _without(tools: Tools) -> str:
    return f"; {listed(tools.left_out)} was left out" if tools.left_out else ""
