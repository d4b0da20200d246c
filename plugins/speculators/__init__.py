"""Speculators that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

MTP = (
    "mtp", "deepseek_mtp", "ernie_mtp", "exaone_moe_mtp", "glm4_moe_lite_mtp", "glm4_moe_mtp",
    "hy_v3_mtp", "longcat_flash_mtp", "mimo_mtp", "mimo_v2_mtp", "qwen3_5_mtp", "qwen3_next_mtp",
)  # fmt: skip
"""The method, and vLLM's older names of it."""


@hookimpl
def register_speculators(registry: Any) -> None:
    registry.add("ngram", "jackfield.plugins.speculators.ngram:Ngram")
    registry.add("suffix", "jackfield.plugins.speculators.suffix:Suffix")
    registry.add("draft_model", "jackfield.plugins.speculators.draft_model:DraftModel")
    registry.add("eagle", "jackfield.plugins.speculators.eagle:Eagle")
    registry.add("eagle3", "jackfield.plugins.speculators.eagle3:Eagle3")
    for name in MTP:
        registry.add(name, "jackfield.plugins.speculators.mtp:Mtp")
    registry.add("medusa", "jackfield.plugins.speculators.medusa:Medusa")
    registry.add("mlp_speculator", "jackfield.plugins.speculators.mlp_speculator:MlpSpeculator")
