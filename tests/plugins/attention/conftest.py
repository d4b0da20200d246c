"""Which cases of the attention kit the flex backend is tried with by day."""

from __future__ import annotations

import pytest

OF_FLEX = ("alibi_slopes+sliding_window+soft_cap-mixed", "mixed-6-2-64-1", "plain-mixed", "sinks")
"""Every feature together and what it refuses. It takes half a second or more for each new shape."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other cases of its parametrized tests as slow."""
    for item in items:
        name, _, case = item.name.partition("[")
        if item.parent is None or item.parent.name != "TestFlex" or not case:
            continue
        if "cache" not in name and not case.startswith(OF_FLEX):
            item.add_marker(pytest.mark.slow)
