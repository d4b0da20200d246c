"""What `jackfield bench tune` writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jackfield.entrypoints.bench import tune, tune_nibbles

FACTS = {"date": "later", "commit": "b", "torch": "2", "triton": "3", "device": "a card"}


def entry(rows: int) -> dict[str, Any]:
    return {"outputs": 64, "inputs": 128, "gated": False, "rows": rows, "shape": None, "us": 1.0}


def test_what_is_not_measured_again_keeps_its_place_and_date() -> None:
    about = {"date": "early", "commit": "a", "torch": "1", "triton": "2"}
    first = json.loads(tune.page({}, {**FACTS, **about}, {"skinny": [entry(8)]}))
    assert first["skinny"] == [entry(8)]
    assert first["nibble_gemv"] == []
    both = json.loads(tune.page(first, FACTS, {"nibble_gemv": [entry(1)]}))
    assert both["skinny"] == [entry(8)]
    assert both["nibble_gemv"] == [entry(1)]
    assert both["date"] == "later"
    assert both["measured"]["skinny"] == about
    assert both["measured"]["nibble_gemv"]["commit"] == "b"


@pytest.mark.parametrize("product", tune.products("Qwen3-8B"), ids=str)
def test_4_bit_candidates_are_shapes_that_fit(product: tuple[int, int, bool]) -> None:
    pytest.importorskip("triton")
    from jackfield.kernels.tuning import SHAPES

    for kernel, counts in tune_nibbles.ROWS.items():
        for rows in counts:
            found = [SHAPES[kernel](*c) for c in tune_nibbles.candidates(kernel, product, rows)]
            assert found
            assert len(set(found)) == len(found)
