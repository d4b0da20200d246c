"""The grammar backends that come with Jackfield."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_structured_backends(registry: Any) -> None:
    here = "jackfield.plugins.grammar_backends"
    registry.add("llguidance", f"{here}.llguidance:LLGuidance", priority=20)
    registry.add("xgrammar", f"{here}.xgrammar:XGrammar", priority=10)
