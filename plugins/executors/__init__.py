"""Executors that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_executors(registry: Any) -> None:
    registry.add("inprocess", "jackfield.plugins.executors.inprocess:InProcessExecutor")
    registry.add("processes", "jackfield.plugins.executors.processes:ProcessesExecutor")
