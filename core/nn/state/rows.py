"""The rows of a step, for operations that read and write a state of each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

FEW_ROWS = 8
"""Rows of one token for which the product behind a layer computes the layer's norm, too."""


@dataclass(frozen=True)
class StateRows:
    """R rows, T tokens. Tensors live on the device; `query_start_cpu` is numpy.

    States are tensors [num_states, ...]: a slot's number is that of its state. A row that begins at
    its sequence's first token takes zeros for its state, whatever an earlier request left there.
    Padding rows share the slot after those of requests.
    """

    num_tokens: int
    slots: torch.Tensor
    """[R] int32 or int64"""
    query_start: torch.Tensor
    """[R + 1] int32: row r's tokens are query_start[r] .. query_start[r + 1]."""
    seq_lens: torch.Tensor
    """[R] int32: tokens of each sequence, those of this step included."""
    query_start_cpu: np.ndarray
    """As `query_start`; undefined with `mixed`."""
    max_query_len: int
    mixed: bool = False
    """Whether only the device knows the rows: a recorded step that may hold prompts."""

    @property
    def few(self) -> bool:
        """Whether each row has one token, and there are at most `FEW_ROWS`."""
        return self.max_query_len == 1 and self.num_tokens <= FEW_ROWS

    @cached_property
    def token_rows(self) -> torch.Tensor:
        """[T] int64: the row of each token."""
        tokens = torch.arange(self.num_tokens, dtype=torch.int32, device=self.slots.device)
        rows = torch.searchsorted(self.query_start[1:].contiguous(), tokens, right=True)
        return rows.clamp_(max=self.slots.shape[0] - 1)

    @cached_property
    def counts(self) -> torch.Tensor:
        """[R] int32: tokens of each row in this step."""
        return self.query_start[1:] - self.query_start[:-1]

    @cached_property
    def begins(self) -> torch.Tensor:
        """[R] bool: whether the row's first token is its sequence's first."""
        return self.seq_lens == self.counts

    def states(self, table: torch.Tensor, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """Return the states of rows before the step, [any rows, ...]: a copy."""
        states = table[self.slots[rows].long()]
        begins = self.begins[rows].view(-1, *(1 for _ in states.shape[1:]))
        # Selected, not multiplied: what is left there may be NaN.
        return states.masked_fill_(begins, 0)

    def longer(self) -> list[tuple[int, int, int]]:
        """Return the rows of several tokens: (row, first token, end)."""
        assert not self.mixed, "the rows are known on the device alone"
        starts = self.query_start_cpu
        rows = np.flatnonzero(np.diff(starts) > 1)
        return [(int(row), int(starts[row]), int(starts[row + 1])) for row in rows]

    def single(self) -> tuple[torch.Tensor | slice, torch.Tensor | slice]:
        """Return the rows of one token, and their tokens; slices if that is all rows."""
        if self.max_query_len == 1:
            return slice(None), slice(None)
        assert not self.mixed, "the rows are known on the device alone"
        starts = self.query_start_cpu
        rows = np.flatnonzero(np.diff(starts) == 1)
        device = self.slots.device
        return (
            torch.from_numpy(rows).to(device),
            torch.from_numpy(starts[rows].astype(np.int64)).to(device),
        )
