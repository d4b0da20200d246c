"""Every test of a kernel runs on a machine with a GPU; in the interpreter one number type of most
cases."""

from __future__ import annotations

import re

import pytest
import torch

DTYPE = re.compile(r"torch\.(float32|float16|bfloat16)|dtype\d+")
HALF = "torch.float16"


def _by_other_types(items: list[pytest.Item]) -> None:
    """Mark as slow all but a case's half precision, or its first number type, besides the first
    case of a test: the interpreter runs the same lines for each."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        name = DTYPE.sub("", item.nodeid)
        if name != item.nodeid and item.get_closest_marker("slow") is None:
            cases.setdefault((item.nodeid.partition("[")[0], name), []).append(item)
    seen: set[str] = set()
    for (test, _), alike in cases.items():
        chosen = next((item for item in alike if HALF in item.nodeid), alike[0])
        for item in alike:
            if item is not chosen and test in seen:
                item.add_marker(pytest.mark.slow)
        seen.add(test)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that `-m gpu` leaves none out, or those that are left to the night."""
    own = [item for item in items if "kernels" in item.path.parts]
    if not torch.cuda.is_available():
        _by_other_types(own)
        return
    for item in own:
        if item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.gpu)
