"""Layers that keep states: where those of a prompt are kept, and how much of it is found again."""

from __future__ import annotations

import pytest
from scheduled import add, drain, make_request, make_scheduler

BLOCK = 16


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_same_prompt_computes_its_last_block_alone(num_blocks: int, more: int) -> None:
    """A prompt of exactly n blocks, too: its last token is always computed."""
    scheduler = make_scheduler(num_snapshots=8)
    length = num_blocks * BLOCK + more
    first, second = (make_request(length, token=7, max_tokens=1) for _ in range(2))
    add(scheduler, first)
    drain(scheduler)
    add(scheduler, second)
    plan = scheduler.schedule()
    assert plan is not None
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (length - 1) // BLOCK * BLOCK)
    assert list(plan.num_tokens) == [length - second.num_cached_tokens]
    drain(scheduler)
    scheduler.check_invariants()
