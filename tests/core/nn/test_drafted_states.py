"""States of rows with drafts: as after a step that had the kept tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.state.drafts import TOKEN_INPUTS, DraftedStates, NotingOperations
from jackfield.core.nn.state.operations import (
    ChannelDeltaWeights,
    ConvWeights,
    DeltaWeights,
    ScanWeights,
    StateOperations,
)
from jackfield.core.nn.state.rows import StateRows
from jackfield.core.nn.state.sizes import DeltaSizes, Mamba2Sizes

SLOTS, PADDING = 5, 4
HEADS, GROUPS, KEY, VALUE, CHANNELS = 4, 2, 3, 5, 6
MAMBA = Mamba2Sizes(8, HEADS, VALUE, KEY, GROUPS, 4)
DELTA = DeltaSizes(8, GROUPS, HEADS, KEY, VALUE, 4)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def scan(*shape: int) -> ScanWeights:
    return ScanWeights(-torch.rand(*shape), draw(shape[0]), draw(shape[0]))


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "causal_conv": lambda t: {
        "x": draw(t, CHANNELS), "weight": draw(CHANNELS, 4), "bias": draw(CHANNELS),
        "state": draw(2 * SLOTS, 3, CHANNELS), "silu": True,
    },
    "ssd_scan": lambda t: {
        "x": draw(t, HEADS, VALUE), "dt": draw(t, HEADS), "b": draw(t, GROUPS, KEY),
        "c": draw(t, GROUPS, KEY), "weights": scan(HEADS),
        "state": draw(2 * SLOTS, HEADS, VALUE, KEY),
    },
    "mamba2": lambda t: {
        "projected": draw(t, sum(MAMBA.projection)),
        "conv": ConvWeights(draw(MAMBA.projection[1], 4), draw(MAMBA.projection[1])),
        "weights": scan(HEADS), "sizes": MAMBA,
        "conv_state": draw(2 * SLOTS, 3, MAMBA.projection[1]),
        "state": draw(2 * SLOTS, HEADS, VALUE, KEY),
    },
    "selective_scan": lambda t: {
        "x": draw(t, CHANNELS), "dt": draw(t, CHANNELS), "b": draw(t, KEY), "c": draw(t, KEY),
        "gate": draw(t, CHANNELS), "weights": scan(CHANNELS, KEY),
        "state": draw(2 * SLOTS, CHANNELS, KEY),
    },
    "delta_rule": lambda t: {
        "q": draw(t, GROUPS, KEY), "k": draw(t, GROUPS, KEY), "v": draw(t, HEADS, VALUE),
        "step": draw(t, HEADS), "beta": draw(t, HEADS),
        "weights": DeltaWeights(-torch.rand(HEADS), draw(HEADS)),
        "state": draw(2 * SLOTS, HEADS, KEY, VALUE),
    },
    "delta_net": lambda t: {
        "projected": draw(t, sum(DELTA.projection)),
        "kernel": draw(DELTA.projection[0], 4),
        "weights": DeltaWeights(-torch.rand(HEADS), draw(HEADS)),
        "norm": draw(VALUE), "eps": 1e-6, "sizes": DELTA,
        "conv_state": draw(2 * SLOTS, 3, DELTA.projection[0]),
        "state": draw(2 * SLOTS, HEADS, KEY, VALUE),
    },
    "channel_delta_rule": lambda t: {
        "q": draw(t, HEADS, KEY), "k": draw(t, HEADS, KEY), "v": draw(t, HEADS, VALUE),
        "step": draw(t, HEADS, KEY), "beta": draw(t, HEADS),
        "weights": ChannelDeltaWeights(-torch.rand(HEADS), draw(HEADS, KEY)),
        "state": draw(2 * SLOTS, HEADS, KEY, VALUE),
    },
}  # fmt: skip


def rows_of(slots: list[int], counts: list[int], before: list[int]) -> StateRows:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return StateRows(
        num_tokens=int(starts[-1]), slots=torch.tensor(slots),
        query_start=torch.from_numpy(starts),
        seq_lens=torch.tensor(counts, dtype=torch.int32) + torch.tensor(before),
        query_start_cpu=starts, max_query_len=max(counts),
    )  # fmt: skip


def test_every_operation_on_states_is_noted() -> None:
    with_state = {
        name
        for name, method in vars(StateOperations).items()
        if callable(method) and "state" in method.__annotations__
    }
    assert with_state == set(TOKEN_INPUTS) == set(CASES)


@pytest.mark.parametrize("name", TOKEN_INPUTS)
@pytest.mark.parametrize("kept", [(1, 1), (2, 2), (4, 1)])
def test_states_are_those_of_the_kept_tokens(name: str, kept: tuple[int, int]) -> None:
    """A row of four tokens, three of them drafts; the beginning of a prompt; a row of two."""
    torch.manual_seed(5)
    slots, counts = [2, 0, 3], [4, 3, 2]
    given = CASES[name](sum(counts))
    states = [key for key in given if key in ("state", "conv_state")]
    alone = {**given, **{key: given[key].clone() for key in states}}
    operations = Operations()
    noting = NotingOperations(operations)
    noting.drafted = drafted = DraftedStates(
        offsets=torch.tensor([SLOTS, 0, SLOTS]),
        tokens=torch.tensor([0, 1, 2, 3, 7, 8]), slots=torch.tensor([2, 3]),
        starts=torch.tensor([0, 4, 6], dtype=torch.int32), max_query_len=4,
        padding_slot=PADDING, on_device=False,
    )  # fmt: skip
    for key in states:
        given[key][[2 + SLOTS, 3 + SLOTS]] = given[key][[2, 3]]
    out = getattr(noting, name)(**given, rows=rows_of(slots, counts, [5, 0, 7]))
    for key in states:
        assert torch.equal(given[key][[2, 3]], alone[key][[2, 3]]), "drafts may be rejected"
    drafted.settle(torch.tensor(kept, dtype=torch.int32))

    whole = {**alone, **{key: alone[key].clone() for key in states}}
    expected = getattr(operations, name)(**whole, rows=rows_of(slots, counts, [5, 0, 7]))
    torch.testing.assert_close(out, expected)
    tokens = [*range(kept[0]), 4, 5, 6, *range(7, 7 + kept[1])]
    short = {**alone, **{key: alone[key][tokens] for key in TOKEN_INPUTS[name]}}
    counts = [kept[0], 3, kept[1]]
    getattr(operations, name)(**short, rows=rows_of(slots, counts, [5, 0, 7]))
    for key in states:
        torch.testing.assert_close(given[key][[0, 2, 3]], short[key][[0, 2, 3]])
        assert torch.equal(given[key][1], short[key][1]), "another request's"


def test_a_slot_that_another_sequence_has_stays_as_it_is() -> None:
    drafted = DraftedStates(
        offsets=torch.tensor([SLOTS]), tokens=torch.tensor([0, 1]), slots=torch.tensor([2]),
        starts=torch.tensor([0, 2], dtype=torch.int32), max_query_len=2, padding_slot=PADDING,
        on_device=False,
    )  # fmt: skip
    noting = NotingOperations(Operations())
    noting.drafted = drafted
    given = CASES["causal_conv"](2)
    before = given["state"].clone()
    noting.causal_conv(**given, rows=rows_of([2], [2], [5]))
    drafted.leave(2)
    drafted.settle(torch.tensor([2], dtype=torch.int32))
    assert torch.equal(given["state"][:PADDING], before[:PADDING])
