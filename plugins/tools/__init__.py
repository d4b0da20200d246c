"""Tool-call parsers that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_tool_parsers(registry: Any) -> None:
    registry.add("hermes", "jackfield.plugins.tools.hermes:HermesToolParser")
