"""What this package plugs into Jackfield. Keep this module light: it is imported at every start."""

from __future__ import annotations

from typing import Any

from jackfield import hookimpl

jackfield_api = 3


@hookimpl
def register_parts(registry: Any) -> None:
    registry.add("token_budget", "jackfield_token_budget.part:TokenBudget")
