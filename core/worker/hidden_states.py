"""Rows of a forward pass's output, in one tensor or several."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..protocols.models import HiddenStates


def parts(states: HiddenStates) -> tuple[torch.Tensor, ...]:
    return states if isinstance(states, tuple) else (states,)


def each(states: HiddenStates, change: Callable[[torch.Tensor], torch.Tensor]) -> HiddenStates:
    """Apply `change` to each tensor."""
    return tuple(map(change, states)) if isinstance(states, tuple) else change(states)


def take(states: HiddenStates, tokens: torch.Tensor) -> HiddenStates:
    """Copy some tokens' rows, [num_rows] int64."""
    return each(states, lambda part: part.index_select(0, tokens))
