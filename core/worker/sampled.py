"""The positions of a step that are sampled, and what was sampled there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .graphs.written_tokens import TokenPlace


class SamplingRows(NamedTuple):
    """The positions of a step that are sampled by torch operations, outside a recorded step. S of
    them: several of a row that has drafts."""

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
    """The plan's row of each position."""
    tensors: dict[str, torch.Tensor]
    """For the host, on the device: `chosen` [positions or more], and LOGPROB_FIELDS if a row has
    log-probabilities."""
    logprob_rows: dict[int, int]
    """Row of the plan → k, for rows with log-probabilities."""
    place: TokenPlace | None = None
    """Where the step itself writes `chosen` for the host."""
