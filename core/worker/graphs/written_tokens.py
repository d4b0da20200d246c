"""Tokens of recorded steps, which the steps write to the host's memory themselves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...nn.operations import Operations

PLACES = 64
"""Far more runs than are launched before the result of the first is read, with those that are only
run to be recorded."""
LAST_RUN = (1 << 30) - 1
"""After it, runs are counted from 0 again."""


class TokenPlace(NamedTuple):
    """Where a run of a recorded step writes."""

    run: int
    numbers: np.ndarray
    """[1 + max_rows] int32: the run that wrote last, and its tokens"""

    def tokens(self) -> np.ndarray:
        """Return the run's tokens, [max_rows] int32, once it is done: valid until PLACES more have
        run. Raises RuntimeError if they are another run's."""
        if (found := int(self.numbers[0])) != self.run:
            raise RuntimeError(
                f"tokens of run {self.run} are sought where run {found} wrote; --enforce-eager "
                "goes without recorded steps, whose tokens these are"
            )
        return self.numbers[1:]


class WrittenTokens:
    """A ring in the host's memory, of a place for each run of a recorded step.

    With a copy after each step, the device would have nothing to do for some microseconds between
    any two. Runs are counted on both sides: on the device by what writes, here by `ran`.
    """

    def __init__(self, operations: Operations, max_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._operations = operations
        self._ring = torch.zeros(PLACES, 1 + max_rows, dtype=torch.int32, pin_memory=pinned)
        self._numbers = self._ring.numpy()
        self._runs_on_device = torch.zeros(1, dtype=torch.int32, device=device)
        self._runs = 0

    def write(self, chosen: torch.Tensor) -> None:
        """Launch what writes tokens, [num_rows] int32, as the last part of a step."""
        self._operations.write_tokens(chosen, self._runs_on_device, self._ring, LAST_RUN)

    def ran(self) -> None:
        """Note that a step was launched or replayed that ends with `write`."""
        self._runs = 0 if self._runs == LAST_RUN else self._runs + 1

    def place(self) -> TokenPlace:
        """Return the place of the last run."""
        return TokenPlace(self._runs, self._numbers[self._runs % PLACES])


def written_tokens(
    operations: Operations, max_rows: int, device: torch.device
) -> WrittenTokens | None:
    """Return a ring; None: these operations cannot write to it, and tokens are copied."""
    return WrittenTokens(operations, max_rows, device) if operations.writes_tokens else None
