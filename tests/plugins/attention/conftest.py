"""Which cases of the attention kit the backends that take long are tried with by day."""

from __future__ import annotations

import pytest
import torch

OF_TRITON = ("test_features[half", "test_quantized_cache[half", "test_fp8_cache[half")
"""Not by day in the interpreter: attention without more is, in half
precision too."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark other cases of their parametrized tests as slow."""
    for item in items:
        backend = "" if item.parent is None else item.parent.name
        seldom = backend == "TestTriton" and item.name.startswith(OF_TRITON)
        if seldom and not torch.cuda.is_available():
            item.add_marker(pytest.mark.slow)
