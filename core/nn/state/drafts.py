"""States of rows with drafts: which of their tokens are kept is known after the forward pass alone.

In the forward pass such a row continues a copy of its slot's state. What the operations on states
are given for its tokens is noted; once the drafts are verified, they are called again for the
tokens that are kept, on the slot's own state. So a state is read and written three times at most,
however many drafts there are, and none is kept for each draft.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from .operations import StateOperations
from .rows import StateRows

TOKEN_INPUTS: Mapping[str, tuple[str, ...]] = {
    "causal_conv": ("x",),
    "ssd_scan": ("x", "dt", "b", "c"),
    "mamba2": ("projected",),
    "selective_scan": ("x", "dt", "b", "c", "gate"),
    "delta_rule": ("q", "k", "v", "step", "beta"),
    "delta_net": ("projected",),
    "channel_delta_rule": ("q", "k", "v", "step", "beta"),
}
"""Operations on states → their arguments with a row per token."""
_PARAMETERS = {
    name: list(inspect.signature(getattr(StateOperations, name)).parameters)[1:]
    for name in TOKEN_INPUTS
}


@dataclass
class DraftedStates:
    """The D rows with drafts of a step, and what was computed of them."""

    offsets: torch.Tensor
    """[num_rows] int64: of every row of the step, from its slot to the state that it continues."""
    tokens: torch.Tensor
    """[Td] int64: the step's tokens in rows with drafts."""
    slots: torch.Tensor
    """[D] int64"""
    starts: torch.Tensor
    """[D + 1] int32: row r's first of `tokens`, and the total."""
    max_query_len: int
    padding_slot: int
    on_device: bool
    """Whether operations read rows on the device alone."""
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = field(default_factory=list)

    def note(
        self, operation: Callable[..., Any], arguments: dict[str, Any], names: Any
    ) -> StateRows:
        """Note a call, and return its rows with copies of states."""
        rows: StateRows = arguments["rows"]
        tokens = {name: arguments[name].index_select(0, self.tokens) for name in names}
        self.calls.append((operation, {**arguments, **tokens}))
        return replace(rows, slots=rows.slots + self.offsets)

    def leave(self, slot: int) -> None:
        """Leave a slot's state as it is: another sequence has it."""
        self.slots.masked_fill_(self.slots == slot, self.padding_slot)

    def settle(self, kept: torch.Tensor) -> None:
        """Leave the states after the first tokens of each row, [D] int32. The others are rows of
        their own, with the padding slot.
        """
        starts = self.starts
        ends = torch.stack((starts[:-1], starts[:-1] + kept), dim=1).flatten()
        query_start = torch.cat((ends, starts[-1:]))
        padding = torch.full_like(self.slots, self.padding_slot)
        rows = StateRows(
            num_tokens=len(self.tokens),
            slots=torch.stack((self.slots, padding), dim=1).flatten(),
            query_start=query_start,
            # No row begins a sequence.
            seq_lens=query_start[1:] - query_start[:-1] + 1,
            query_start_cpu=np.zeros(0) if self.on_device else query_start.cpu().numpy(),
            max_query_len=self.max_query_len,
            mixed=self.on_device,
        )
        calls, self.calls = self.calls, []
        for operation, arguments in calls:
            operation(**{**arguments, "rows": rows})


class NotingOperations:
    """Operations of layers with states, which note calls of a step with drafts."""

    def __init__(self, operations: Any) -> None:
        self._operations = operations
        self.drafted: DraftedStates | None = None
        """Of the step that is launched; None: no row has drafts."""

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._operations, name)
        if name not in TOKEN_INPUTS:
            return operation

        def call(*arguments: Any, **named: Any) -> Any:
            if self.drafted is None:
                return operation(*arguments, **named)
            by_name = dict(zip(_PARAMETERS[name], arguments, strict=False)) | named
            rows = self.drafted.note(operation, by_name, TOKEN_INPUTS[name])
            return operation(**{**by_name, "rows": rows})

        return call
