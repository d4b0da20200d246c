"""What this package plugs into Jackfield. Keep this module light: it is imported at every start."""

from __future__ import annotations

from typing import Any

from jackfield import hookimpl

jackfield_api = 3


@hookimpl
def register_tool_parsers(registry: Any) -> None:
    registry.add("brackets", "jackfield_brackets.tools:BracketsToolParser")


@hookimpl
def register_reasoning_parsers(registry: Any) -> None:
    registry.add("brackets", "jackfield_brackets.reasoning:BracketsReasoningParser")
