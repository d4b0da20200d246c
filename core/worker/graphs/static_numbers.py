"""Numbers at a fixed place on the device, from which recorded steps read what differs."""

from __future__ import annotations

import numpy as np
import torch

from ..batch import PersistentBatch


class StaticNumbers:
    """An int32 array that is sent where it changes: between two steps without a copy, the device
    does not stop for one. Most steps of few rows give no row a block, and have equal numbers."""

    def __init__(self, batch: PersistentBatch, size: int) -> None:
        self.array = torch.zeros(size, dtype=torch.int32, device=batch.device)
        """[size] Nothing else writes to it."""
        self._batch = batch
        self._sent = np.empty(0, dtype=np.int32)
        """What the array begins with."""

    def send(self, numbers: np.ndarray) -> None:
        """Let the array begin with these numbers, int32. The caller does not change them later."""
        if not np.array_equal(numbers, self._sent):
            self._batch.copy_into(self.array, numbers)
            self._sent = numbers
