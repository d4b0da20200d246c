"""Operations for the CPU in which a row's result does not depend on the rows beside it.

A library may multiply a row in another order if there are others, and a vectorized exponential
differs from the scalar one that computes what is left over at an array's end. So each row is
computed by itself, from memory of its own: calls, and how their arguments lie in memory, are the
same in any step. A prompt costs as much per token as decoding does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from ...core.nn.operations import Operations
from ...core.nn.routing import Routing, RoutingRule, choose_experts


def by_row(compute: Callable[..., torch.Tensor], *parts: torch.Tensor) -> torch.Tensor:
    """Return `compute` of each row by itself, joined. parts: [T, any] each."""
    if not len(parts[0]):
        return compute(*parts)
    # A view of a row could begin at any address, on which libraries' sums may depend.
    rows = zip(*(part.unsqueeze(1).unbind() for part in parts), strict=True)
    return torch.cat([compute(*(row.clone() for row in each)) for each in rows])


class InvariantTorchOperations(Operations):
    """Norms and rotations are the reference's: their sums are by row, and in one order."""

    name: ClassVar[str] = "torch_invariant"
    features: ClassVar[frozenset[str]] = Operations.features
    batch_invariant: ClassVar[bool] = True

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None if device.type == "cpu" else "it is for the CPU"

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        compute = super().product
        return by_row(lambda row: compute(row, weight, bias), x)

    def pointwise(
        self, function: Callable[..., torch.Tensor], *parts: torch.Tensor
    ) -> torch.Tensor:
        return by_row(function, *parts)

    def route(self, logits: torch.Tensor, rule: RoutingRule) -> Routing:
        if not len(logits):
            return choose_experts(logits, rule)
        rows = [choose_experts(row.clone()[None], rule) for row in logits]
        return Routing(
            torch.cat([row.weights for row in rows]), torch.cat([row.experts for row in rows])
        )
