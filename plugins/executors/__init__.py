"""Executors that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_executors(registry: Any) -> None:
    # Aliases are vLLM's names.
    registry.add(
        "inprocess", "jackfield.plugins.executors.inprocess:InProcessExecutor", priority=20,
        aliases=("uni",),
    )  # fmt: skip
    registry.add(
        "processes", "jackfield.plugins.executors.processes:ProcessesExecutor", priority=10,
        aliases=("mp",),
    )  # fmt: skip
