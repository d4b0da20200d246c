"""A step of all engines that divide a mixture's experts among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..protocols.collectives import Collectives


class Round:
    """What a rank knows of the step that all engines compute now. Of the launch thread."""

    def __init__(self, counts: Collectives, num_ranks: int) -> None:
        """counts: all ranks of all engines, for tensors of the host; num_ranks: of each engine."""
        self.capacity: int | None = None
        """Most tokens that any rank sends in a layer; None: no round is on."""
        self.waits: Callable[[bool], None] = lambda waits: None
        """Called when this rank begins, and ends, to wait for the others."""
        self.num_ranks = num_ranks
        """Ranks of an engine."""
        self._counts = counts

    def begin(self, num_tokens: int) -> int:
        """Wait until all ranks begin. num_tokens: of this engine. Return the largest number of
        any engine."""
        import torch

        self.waits(True)
        most = int(self._counts.all_gather(torch.tensor([num_tokens])).max())
        self.waits(False)
        self.capacity = -(-most // self.num_ranks)
        return most

    def end(self) -> None:
        """All layers are launched."""
        self.capacity = None

    def close(self) -> None:
        """Leave the group."""
        self._counts.close()
