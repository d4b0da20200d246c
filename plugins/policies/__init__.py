"""Schedule policies that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_schedule_policies(registry: Any) -> None:
    registry.add("fcfs", "jackfield.plugins.policies.builtin:FirstComeFirstServed")
    registry.add("priority", "jackfield.plugins.policies.builtin:Priority")
