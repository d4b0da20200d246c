"""On a machine with a GPU every test of a kernel runs there."""

from __future__ import annotations

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that `-m gpu` leaves none out."""
    if not torch.cuda.is_available():
        return
    for item in items:
        if "kernels" in item.path.parts and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.gpu)
