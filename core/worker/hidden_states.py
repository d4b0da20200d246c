"""Rows of what a forward pass leaves for logits: of one tensor, or of several."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..protocols.models import HiddenStates


def parts(states: HiddenStates) -> tuple[torch.Tensor, ...]:
    """Return the tensors."""
    return states if isinstance(states, tuple) else (states,)


def each(states: HiddenStates, change: Callable[[torch.Tensor], torch.Tensor]) -> HiddenStates:
    """Return the states with `change` applied to each tensor."""
    return tuple(map(change, states)) if isinstance(states, tuple) else change(states)


def take(states: HiddenStates, tokens: torch.Tensor) -> HiddenStates:
    """Copy the rows of some tokens, [num_rows] int64."""
    return each(states, lambda part: part.index_select(0, tokens))
