"""Reasoning parsers that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_reasoning_parsers(registry: Any) -> None:
    registry.add("qwen3", "jackfield.plugins.reasoning.think_tags:Qwen3Reasoning")
    registry.add("think_tags", "jackfield.plugins.reasoning.think_tags:ThinkTagsReasoning")
