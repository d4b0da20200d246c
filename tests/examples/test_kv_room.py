"""How many requests of models' shapes run at once when half of their tokens stay."""

from __future__ import annotations

import pytest

from jackfield.entrypoints.bench.workloads import ARCHITECTURES
from jackfield.examples.benchmarks.kv_room import Load, room


@pytest.mark.parametrize(
    ("model", "whole", "windows"),
    [("Qwen3-8B", 8, 0), ("GPT-OSS-20B", 7, 9), ("Gemma-3-27B", 5, 5 * 65)],
)
def test_half_of_the_tokens_lets_nearly_twice_as_many_in(
    model: str, whole: int, windows: int
) -> None:
    """By the scheduler's books: 8 times 2,081 blocks, of which a whole request of 33,280 tokens
    holds 2,080, those of windows, and while its prompt is computed, those of a chunk in each group
    with a window; 1,056 are left of it. Nothing that is reserved for others may keep them out."""
    load, config = Load(requests=20), ARCHITECTURES[model]
    before, after = room(config, None, load), room(config, 0.5, load)
    assert before.most == whole
    assert before.windows == pytest.approx(windows / (2080 + windows), abs=0.002)
    ceiling = (2080 + windows) / (1056 + windows)
    assert after.fits / before.fits == pytest.approx(ceiling, abs=0.01)
    assert after.most / before.most >= min(1.8, ceiling)
