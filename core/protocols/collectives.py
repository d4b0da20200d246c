"""The contract of collectives: how ranks exchange tensors."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ..parallel.ranks import Transfer


@dataclass(frozen=True)
class CollectivesSetup:
    """What a rank knows of its group before it joins."""

    rank: int
    """From 0."""
    size: int
    """Number of ranks."""
    address: tuple[str, int]
    """Host and port where rank 0 listens; the others connect to it."""
    listener: socket.socket | None
    """Rank 0's listening socket at `address`, which it may take over; None: it opens one."""
    device: torch.device
    """Where this rank's tensors are."""
    timeout: float
    """Seconds that a rank waits for the others when they join, and in each call that waits on the
    host. Calls that wait on a device end when the group is closed: the engine finds ranks that
    hang."""


class Collectives(Protocol):
    """A rank's end of a group (`core.parallel.ranks.LinkedGroup`). It takes all that it needs as
    arguments, so that a process can have several groups and never sets environment variables for
    them. To test collectives: `jackfield.plugins.conformance.collectives`.

    Tensors may have been made in `torch.inference_mode`, in which the engine calls all methods but
    `close`. That mode is a thread's own: a thread that the group starts must enter it before it
    writes to them, or torch raises ("Inplace update to inference tensor outside InferenceMode").
    """

    rank: int
    size: int

    @staticmethod
    def supports(device: torch.device) -> str | None:
        """Return why it cannot exchange tensors of this device here, in one clause; None if it
        can."""

    def __init__(self, setup: CollectivesSetup) -> None:
        """Join; returns when all ranks have. Raises ConfigError (`tensor_parallel_size`) if they do
        not within the timeout, and where it cannot work here (`collectives`)."""

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of `x` over all ranks, plus the residual, which is the same on all: the
        same bits on each, [any] → the same shape. Both are contiguous and may be overwritten.

        On a device with streams: queued on the current stream, and recordable in a graph of it.
        """

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, joined in the last dimension, by rank: [..., n] → [...,
        size * n]. As `all_reduce` otherwise."""

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send `x`, which is contiguous, to another rank, without waiting for it on the host or on
        the current stream. `x` may be overwritten by what is queued after this call.

        Tensors from one rank to another arrive in the order in which they were sent. The first call
        for a pair of ranks in one direction may wait for the other side. Never recorded.
        """

    def receive(self, into: torch.Tensor, source: int) -> Transfer:
        """Let the next tensor from a rank fill `into`, which is contiguous, of the same shape and
        type. Does not wait; the result's `wait` does, on a device with streams on the current
        one, and raises what went wrong. Filled by a thread: see above. Never recorded."""

    def close(self) -> None:
        """Leave. Waits for no other rank; graphs that use the group are gone. Called once."""
