"""Sends tokens to their experts' ranks, and results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .expert_share import ExpertShare

if TYPE_CHECKING:
    import torch

    from ..protocols.all2all import All2All
    from .round import Round

    Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertExchange:
    """One layer's exchange. All ranks of an engine have all its tokens of a step; each sends an
    equal part.
    """

    def __init__(self, backend: All2All, share: ExpertShare, round: Round | None) -> None:
        """round: of all engines, if the ranks are those of several; None: of one."""
        self.backend, self.share, self._round = backend, share, round
        self._size = backend.size if round is None else round.num_ranks
        """Ranks of the engine."""

    def run(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """Return all ranks' experts' results for this rank's tokens, and zeros for others', so that
        the sum over the engine's ranks is complete: [T, hidden_size].

        x: [T, hidden_size]; experts: [T, top_k] int32, from this rank's first; weights: [T, top_k].
        compute: (x, experts, weights) of other tokens → this rank's contribution.
        """
        num_tokens = len(x)
        capacity = part = -(-num_tokens // self._size)
        if self._round is not None:
            if self._round.capacity is None:
                return self._alone(x, experts, weights, compute)
            assert part <= self._round.capacity, "the engine said how many tokens it has"
            capacity = self._round.capacity
        first = min(num_tokens, self.backend.rank % self._size * part)
        own = slice(first, min(num_tokens, first + part))
        sent = self.backend.dispatch(
            x[own].contiguous(),
            self.share.spread(experts[own]),
            weights[own].contiguous(),
            num_local_experts=self.share.most,
            capacity=capacity,
        )
        out = compute(sent.x, sent.experts, sent.weights)
        total = x.new_zeros(x.shape)
        total[own] = self.backend.combine(out, sent.handle)
        return total

    def _alone(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """Compute as many tokens as come to a rank if all engines have as many, without them: to
        compile, and to measure the memory. The result is meaningless."""
        times = self.backend.size // self._size
        out = compute(x.repeat(times, 1), experts.repeat(times, 1), weights.repeat(times, 1))
        return out[: len(x)]
