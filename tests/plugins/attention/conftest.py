"""Which cases of the attention kit the backends that take long are tried with by day."""

from __future__ import annotations

import pytest
import torch

OF_FLEX = (
    "alibi_slopes+sliding_window+soft_cap-mixed", "mixed-6-2-64-1", "plain-mixed", "sinks-",
    "sinks+sliding_window", "sliding_window]", "attention_chunk_size+chunk_lookback-mixed",
    "attention_chunk_size+chunk_lookback]",
)  # fmt: skip
"""Every feature together and what it refuses. It takes half a second or more for each new shape."""
OF_TRITON = ("test_features[half", "test_quantized_cache[half", "test_fp8_cache[half")
"""Not by day in the interpreter: attention without more is, in half
precision too."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark other cases of their parametrized tests as slow."""
    for item in items:
        name, _, case = item.name.partition("[")
        backend = "" if item.parent is None else item.parent.name
        seldom = {
            "TestFlex": case and "cache" not in name and not case.startswith(OF_FLEX),
            "TestTriton": item.name.startswith(OF_TRITON) and not torch.cuda.is_available(),
        }
        if seldom.get(backend):
            item.add_marker(pytest.mark.slow)
