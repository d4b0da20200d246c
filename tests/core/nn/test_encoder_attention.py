"""Attention in both directions: ragged rows against one row at a time, however they are grouped."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.ragged import PADDING_ALLOWED, RaggedRows

CPU = torch.device("cpu")


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_rows_do_not_see_each_other(lengths: list[int]) -> None:
    starts = starts_of(lengths)
    torch.manual_seed(int(starts[-1]))
    query, key, value = torch.randn(3, int(starts[-1]), 2, 8)
    rows = RaggedRows.of(starts, CPU)
    out = Operations().bidirectional_attention(query, key, value, rows, 0.3)
    for first, end in itertools.pairwise(starts):
        q, k, v = (part[first:end].transpose(0, 1) for part in (query, key, value))
        expected = torch.softmax(q @ k.transpose(1, 2) * 0.3, -1) @ v
        torch.testing.assert_close(out[first:end], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=40))
def test_groups_pad_little_and_hold_each_token_once(lengths: list[int]) -> None:
    rows = RaggedRows.of(starts_of(lengths), CPU)
    tokens = torch.cat([group.source for group in rows.groups])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    for group in rows.groups:
        assert len(group.source) >= (1 - PADDING_ALLOWED) * group.tokens.numel()
        assert (group.visible is None) == (len(group.source) == group.tokens.numel())


def test_rows_of_one_length_are_one_product_without_a_mask() -> None:
    [group] = RaggedRows.of(starts_of([7] * 5), CPU).groups
    assert group.visible is None and group.tokens.shape == (5, 7)
