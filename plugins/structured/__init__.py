"""Grammar backends that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_structured_backends(registry: Any) -> None:
    here = "jackfield.plugins.structured"
    registry.add("llguidance", f"{here}.llguidance:LLGuidance", priority=20)
    registry.add("xgrammar", f"{here}.xgrammar:XGrammar", priority=10)
