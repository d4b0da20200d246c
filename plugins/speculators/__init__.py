"""Speculators that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_speculators(registry: Any) -> None:
    registry.add("ngram", "jackfield.plugins.speculators.ngram:Ngram")
    registry.add("suffix", "jackfield.plugins.speculators.suffix:Suffix")
