"""Tokens that recorded steps write to host memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...nn.operations import Operations

PLACES = 64
"""Far more runs than are ever unread."""
LAST_RUN = (1 << 30) - 1
"""Runs are counted modulo this + 1."""


class TokenPlace(NamedTuple):
    """Where a run writes."""

    run: int
    numbers: np.ndarray
    """[1 + max_rows] int32: last run, and its tokens"""

    def tokens(self) -> np.ndarray:
        """Return the finished run's tokens, [max_rows] int32, valid for PLACES runs. Raises
        RuntimeError if overwritten.
        """
        if (last_run := int(self.numbers[0])) != self.run:
            raise RuntimeError(
                f"tokens of run {self.run} are sought where run {last_run} wrote; --enforce-eager "
                "goes without recorded steps, whose tokens these are"
            )
        return self.numbers[1:]


class WrittenTokens:
    """A ring in host memory with a place per run, saving the microseconds of a copy per step.

    The device counts runs when it writes, the host in `ran`.
    """

    def __init__(self, operations: Operations, max_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._operations = operations
        self._ring = torch.zeros(PLACES, 1 + max_rows, dtype=torch.int32, pin_memory=pinned)
        self._numbers = self._ring.numpy()
        self._runs_on_device = torch.zeros(1, dtype=torch.int32, device=device)
        self._runs = 0

    def write(self, chosen: torch.Tensor) -> None:
        """Launch the write of tokens, [num_rows] int32, as the step's last part."""
        self._operations.write_tokens(chosen, self._runs_on_device, self._ring, LAST_RUN)

    def ran(self) -> None:
        """Count a launch or replay that ends with `write`."""
        self._runs = 0 if self._runs == LAST_RUN else self._runs + 1

    def place(self) -> TokenPlace:
        return TokenPlace(self._runs, self._numbers[self._runs % PLACES])


def written_tokens(
    operations: Operations, max_rows: int, device: torch.device
) -> WrittenTokens | None:
    """Return a ring, or None if these operations copy tokens."""
    return WrittenTokens(operations, max_rows, device) if operations.writes_tokens else None
