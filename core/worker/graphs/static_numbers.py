"""Numbers at a fixed device address, read by recorded steps."""

from __future__ import annotations

import numpy as np
import torch

from ..batch import PersistentBatch


class StaticNumbers:
    """An int32 array, sent only when it changes, as most small steps do not change it and the
    device stops for copies.
    """

    def __init__(self, batch: PersistentBatch, size: int) -> None:
        self.array = torch.zeros(size, dtype=torch.int32, device=batch.device)
        """[size] Written here only."""
        self._batch = batch
        self._sent = b""
        """The array's beginning."""

    def send(self, numbers: np.ndarray) -> None:
        """Set the array's beginning to int32 numbers."""
        if (content := numbers.tobytes()) != self._sent:
            self._batch.copy_into(self.array, numbers)
            self._sent = content
