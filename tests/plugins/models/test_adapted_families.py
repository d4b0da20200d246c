"""Adapters of the layers of every family, against transformers with the same changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_fallback
import test_families
import test_indexed_families
import test_latent_families
import test_mixtures
import test_state_families

from jackfield.plugins.conformance.adapted_model import check_adapters
from jackfield.plugins.conformance.paged_model import PagedModel

Make = Callable[[str, Path], tuple[Any, Path]]


def saved(make: Callable[..., Any], cases: dict[str, dict[str, Any]]) -> Make:
    def reference_and_folder(case: str, folder: Path) -> tuple[Any, Path]:
        reference = make(case, cases[case])
        return reference, test_families.checkpoint(reference, case.partition(":")[0], folder)

    return reference_and_folder


MAKERS: dict[str, tuple[Make, Any]] = {
    "family": (saved(test_families.make_reference, test_families.CASES), test_families.CASES),
    "latent": (
        saved(test_latent_families.latent_reference, test_latent_families.CASES),
        test_latent_families.CASES,
    ),
    "indexed": (
        saved(test_latent_families.latent_reference, test_indexed_families.CASES),
        test_indexed_families.CASES,
    ),
    "states": (test_state_families.reference_and_folder, test_state_families.CASES),
    "mixture": (
        lambda case, path: test_fallback.folder_of(case, test_mixtures.CASES[case], path),
        test_mixtures.CASES,
    ),
    "fallback": (
        lambda case, path: test_fallback.folder_of(case, test_fallback.CASES[case], path),
        test_fallback.CASES,
    ),
}
BY_DAY = {
    ("family", "GPT2LMHeadModel"), ("latent", "DeepseekV3ForCausalLM"),
    ("states", "Qwen3NextForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=() if (kind, case) in BY_DAY else pytest.mark.slow)
        for kind, (_, cases) in MAKERS.items()
        for case in cases
    ],
)
def test_adapters_change_layers_as_in_transformers(kind: str, case: str, tmp_path: Path) -> None:
    if case == "AriaTextForCausalLM" and test_fallback.OLDER:
        pytest.skip("its experts ask for values in transformers 5.17, and so are refused")
    reference, folder = MAKERS[kind][0](case, tmp_path)
    options = {"model_impl": "transformers"} if kind == "fallback" else {}
    model = PagedModel(folder, "float32", **options)
    refused = check_adapters(model, reference, test_families.score, 2e-3)
    assert all("lora_path: the adapter changes" in reason for reason in refused)
