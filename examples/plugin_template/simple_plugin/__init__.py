"""What this package plugs into Jackfield. Keep this module light: it is imported at every start."""

from __future__ import annotations

from typing import Any

from jackfield import hookimpl

jackfield_api = 3


@hookimpl
def register_tool_parsers(registry: Any) -> None:
    registry.add("simple_tags", "simple_plugin.tool_parser:SimpleTagsParser")


@hookimpl
def register_schedule_policies(registry: Any) -> None:
    registry.add("shortest_prompt", "simple_plugin.policy:ShortestPrompt")
