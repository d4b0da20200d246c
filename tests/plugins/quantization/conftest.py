"""Which families of models each format is tried with by day."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.plugins.conformance.quantization import QuantizationKit

FUSED = ("test_layers_multiply_by_the_dequantised_weights",)
"""What fused tensors change, besides what one format is tried with."""
EXPERTS = (*FUSED, "test_ranks_hold_their_parts_of_the_weights")
"""What a format has of its own for experts."""


WHOLE = "TestRtn4"
"""The format that all is tried with."""
KERNELS = (*FUSED, "test_engine_gives_the_dequantised_models_log_probabilities")
"""Of formats that are tried through Triton, too: what its kernels compute. How tensors are read is
the same."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what WHOLE is tried with, and what does not depend on the format: Qwen3's
    layers, which are Llama's without biases, and most of Phi3's and of a mixture's."""
    for item in items:
        kit: Any = getattr(item, "cls", None)
        if kit is None or not issubclass(kit, QuantizationKit) or kit.__name__ == WHOLE:
            continue
        family = item.name.rpartition("[")[2].rstrip("]")
        of_its_own = {"Qwen3": (), "Phi3": FUSED, "Qwen3Moe": EXPERTS}.get(family)
        if of_its_own is not None and not item.name.startswith(of_its_own):
            item.add_marker(pytest.mark.slow)
        if kit.__name__.endswith("ThroughTriton") and not item.name.startswith(KERNELS):
            item.add_marker(pytest.mark.slow)
