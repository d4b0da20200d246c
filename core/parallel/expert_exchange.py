"""Sends tokens to their experts' ranks, and results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .expert_share import ExpertShare

if TYPE_CHECKING:
    import torch

    from ..protocols.all2all import All2All


class ExpertExchange:
    """One layer's exchange. All ranks of a group have all tokens of a step; each sends an equal
    part.
    """

    def __init__(self, backend: All2All, share: ExpertShare) -> None:
        self.backend, self.share = backend, share

    def run(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return all ranks' experts' results for this rank's tokens, and zeros for others', so that
        the sum over ranks is complete: [T, hidden_size].

        x: [T, hidden_size]; experts: [T, top_k] int32, from this rank's first; weights: [T, top_k].
        compute: (x, experts, weights) of other tokens → this rank's contribution.
        """
        backend, num_tokens = self.backend, len(x)
        capacity = -(-num_tokens // backend.size)
        own = slice(
            min(num_tokens, backend.rank * capacity), min(num_tokens, (backend.rank + 1) * capacity)
        )
        sent = backend.dispatch(
            x[own].contiguous(),
            self.share.spread(experts[own]),
            weights[own].contiguous(),
            num_local_experts=self.share.most,
            capacity=capacity,
        )
        out = compute(sent.x, sent.experts, sent.weights)
        total = x.new_zeros(x.shape)
        total[own] = backend.combine(out, sent.handle)
        return total
