"""Sampled positions of a step, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .graphs.written_tokens import TokenPlace, WrittenTokens


class SamplingRows(NamedTuple):
    """S positions sampled by torch outside of recorded steps; several per row with drafts."""

    rows: list[int]
    """[S] The plan's row."""
    slots_host: list[int]
    """[S]"""
    slots: torch.Tensor
    """[S] int64, on the device"""
    lengths: torch.Tensor
    """[S] int64: tokens before the one that is sampled"""


class Sampled(NamedTuple):
    """What a step has sampled."""

    rows: Sequence[int]
    """Row of the plan of each position."""
    tensors: dict[str, torch.Tensor]
    """On the device, for the host: `chosen` [positions or more], and LOGPROB_FIELDS if
    requested."""
    logprob_rows: dict[int, int]
    """Row → k, with log-probabilities."""
    place: TokenPlace | None = None
    """Where the step writes `chosen`."""

    def written(self, ring: WrittenTokens | None) -> Sampled:
        """Return the same of the last run that wrote to a ring, if there is one."""
        place = None if ring is None else ring.place()
        return Sampled(self.rows, dict(self.tensors), self.logprob_rows, place)
