"""What `jackfield bench tune` writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jackfield.entrypoints.bench.kernels import tune, tune_int4

FACTS = {"date": "later", "commit": "b", "torch": "2", "triton": "3", "device": "a card"}


def entry(rows: int) -> dict[str, Any]:
    return {"outputs": 64, "inputs": 128, "gated": False, "rows": rows, "config": None, "us": 1.0}


def test_what_is_not_measured_again_keeps_its_place_and_date() -> None:
    about = {"date": "early", "commit": "a", "torch": "1", "triton": "2"}
    first = json.loads(tune.page({}, {**FACTS, **about}, {"small_m_matmul": [entry(8)]}))
    assert first["small_m_matmul"] == [entry(8)]
    assert first["int4_gemv"] == []
    both = json.loads(tune.page(first, FACTS, {"int4_gemv": [entry(1)]}))
    assert both["small_m_matmul"] == [entry(8)]
    assert both["int4_gemv"] == [entry(1)]
    assert both["date"] == "later"
    assert both["measured"]["small_m_matmul"] == about
    assert both["measured"]["int4_gemv"]["commit"] == "b"


@pytest.mark.parametrize("product", tune.products("Qwen3-8B"), ids=str)
def test_4_bit_candidates_are_shapes_that_fit(product: tuple[int, int, bool]) -> None:
    pytest.importorskip("triton")
    from jackfield.kernels.tuning import CONFIGS

    for kernel, counts in tune_int4.ROWS.items():
        for rows in counts:
            configs = [CONFIGS[kernel](*c) for c in tune_int4.candidates(kernel, product, rows)]
            assert configs
            assert len(set(configs)) == len(configs)
