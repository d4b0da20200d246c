"""The contract of all-to-all backends: how tokens come to the ranks that hold their experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from .collectives import CollectivesSetup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class All2AllSetup(CollectivesSetup):
    """What a rank knows of its group before it joins."""

    max_tokens: int
    """Most tokens that a rank sends at once."""


class Dispatched(NamedTuple):
    """Tokens that have come to a rank. N: their number, and perhaps some that are none."""

    x: torch.Tensor
    """[N, hidden_size]"""
    experts: torch.Tensor
    """[N, top_k] int32: number of each token's experts on this rank, from 0; numbers out of range
    are other ranks', or of a row that is no token."""
    weights: torch.Tensor
    """[N, top_k] float32; of experts on other ranks, any."""
    handle: Any
    """What `All2All.combine` needs, such as how many tokens came from which rank."""


class All2All(Protocol):
    """A rank's end of an exchange of tokens between the ranks that divide a mixture's experts. A
    process may have several. To test a backend: `jackfield.plugins.conformance.all2all`.

    All ranks make the same calls in the same order: `dispatch`, then `combine` of its result. On a
    device with streams, both are queued on the current one. n: the tokens of one rank, which may
    differ between ranks, and be 0.
    """

    recordable: ClassVar[bool]
    """Whether calls can be recorded in a graph: they never wait for the device. False: steps of the
    engine are not recorded."""
    rank: int
    size: int

    @staticmethod
    def supports(device: torch.device) -> str | None:
        """Return why it cannot exchange tensors of this device here, in one clause; None if it
        can."""

    def __init__(self, setup: All2AllSetup) -> None:
        """Join; returns when all ranks have. Raises ConfigError (`tensor_parallel_size`) if they do
        not within the timeout, and where it cannot work here (`all2all_backend`)."""

    def dispatch(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        *,
        num_local_experts: int,
        capacity: int,
    ) -> Dispatched:
        """Send each token to all ranks that hold one of its experts, once, and return what has come
        to this one.

        x: [n, hidden_size]; experts: [n, top_k] int32, all different in a row: rank r holds the
        numbers from r * num_local_experts on; weights: [n, top_k] float32. capacity: most tokens of
        any rank in this call. All contiguous; nothing is overwritten.
        """

    def combine(self, out: torch.Tensor, handle: Any) -> torch.Tensor:
        """Send back what the experts of this rank have computed, and return for each token the sum
        over all ranks: out [N, hidden_size], times the weights already, as `Dispatched.x` →
        [n, hidden_size]."""

    def close(self) -> None:
        """Leave the group, without waiting for the other ranks. From another thread, that ends
        calls that wait for them, where the library can."""
