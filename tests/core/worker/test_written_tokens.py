"""The ring into which recorded steps write their tokens."""

from __future__ import annotations

import os
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.nn.operations import Operations
from jackfield.core.worker.graphs import written_tokens
from jackfield.core.worker.graphs.written_tokens import PLACES, WrittenTokens
from jackfield.core.worker.launched_step import LaunchedStep
from jackfield.plugins.operations.triton import TritonOperations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(ring: WrittenTokens, *tokens: int) -> None:
    ring.write(torch.tensor(tokens, dtype=torch.int32, device=DEVICE))
    ring.ran()


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def test_operations_that_do_not_write_have_no_ring() -> None:
    assert written_tokens.written_tokens(Operations(), 2, DEVICE) is None
    assert written_tokens.written_tokens(TritonOperations(), 2, DEVICE) is not None


@settings(max_examples=20, deadline=None)
@given(reads=st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_each_step_reads_its_own_tokens(reads: list[int]) -> None:
    """Steps are read in order, some time after they ran; runs may be counted from 0 meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_tokens, "LAST_RUN", 2 * PLACES - 1)
        ring = WrittenTokens(TritonOperations(), 3, DEVICE)
        ring._runs = 2 * PLACES - 9
        ring._runs_on_device.fill_(ring._runs)
        pending: deque[tuple[int, written_tokens.TokenPlace]] = deque()
        for number, count in enumerate(reads):
            run(ring, number, number + 1000)
            pending.append((number, ring.place()))
            wait()
            for _ in range(min(count, len(pending))):
                first, place = pending.popleft()
                assert place.tokens()[:2].tolist() == [first, first + 1000]


def test_tokens_that_were_overwritten_are_refused() -> None:
    ring = WrittenTokens(TritonOperations(), 1, DEVICE)
    run(ring, 5)
    place = ring.place()
    for number in range(PLACES - 1):
        run(ring, number)
    wait()
    assert place.tokens().tolist() == [5]
    run(ring, 6)
    wait()
    with pytest.raises(RuntimeError, match=f"of run 1 are sought where run {PLACES + 1} wrote"):
        place.tokens()


def test_a_step_has_the_tokens_of_its_rows() -> None:
    """Of a recorded step with room for four rows, of which the first and the third sample."""
    ring = WrittenTokens(TritonOperations(), 4, DEVICE)
    run(ring, 7, 0, 9, 0)
    wait()
    plan: object = None
    step = LaunchedStep(plan, [0, 2], {}, {}, [], None, place=ring.place())  # type: ignore[arg-type]
    assert step.kept_tokens() == [[7], [9]]
