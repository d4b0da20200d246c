"""Speculators that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

FAMILIES = ("deepseek", "ernie", "glm4_moe", "glm4_moe_lite", "mimo", "qwen3_5", "qwen3_next")
"""Families whose name is in vLLM's older names of `mtp`."""


@hookimpl
def register_speculators(registry: Any) -> None:
    registry.add("ngram", "jackfield.plugins.speculators.ngram:Ngram")
    registry.add("suffix", "jackfield.plugins.speculators.suffix:Suffix")
    registry.add("draft_model", "jackfield.plugins.speculators.draft_model:DraftModel")
    registry.add("eagle", "jackfield.plugins.speculators.eagle:Eagle")
    registry.add("eagle3", "jackfield.plugins.speculators.eagle3:Eagle3")
    for name in ("mtp", *(f"{family}_mtp" for family in FAMILIES)):
        registry.add(name, "jackfield.plugins.speculators.mtp:Mtp")
    registry.add("medusa", "jackfield.plugins.speculators.medusa:Medusa")
    registry.add("mlp_speculator", "jackfield.plugins.speculators.mlp_speculator:MlpSpeculator")
