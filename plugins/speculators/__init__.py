"""Speculators that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_speculators(registry: Any) -> None:
    registry.add("ngram", "jackfield.plugins.speculators.ngram:Ngram")
    registry.add("suffix", "jackfield.plugins.speculators.suffix:Suffix")
    registry.add("draft_model", "jackfield.plugins.speculators.draft_model:DraftModel")
    registry.add("eagle", "jackfield.plugins.speculators.eagle:Eagle")
    registry.add("eagle3", "jackfield.plugins.speculators.eagle3:Eagle3")
