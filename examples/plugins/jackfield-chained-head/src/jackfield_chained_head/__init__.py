"""Plugs a speculator with weights into Jackfield."""

from __future__ import annotations

from typing import Any

from jackfield import hookimpl

jackfield_api = 3


@hookimpl
def register_speculators(registry: Any) -> None:
    registry.add("chained_head", "jackfield_chained_head.head:ChainedHead")
