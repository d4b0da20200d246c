"""The executor `ray`: ranks on the hosts of a Ray cluster."""

from __future__ import annotations

from typing import Any

from ....core.hooks import hookimpl


@hookimpl
def register_executors(registry: Any) -> None:
    registry.add("ray", "jackfield.plugins.executors.ray.executor:RayExecutor", priority=0)
