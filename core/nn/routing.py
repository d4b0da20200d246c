"""How a router chooses the experts of each token, in plain torch: the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

TINY = 1e-20
"""Added to a sum of weights, so that weights that are all zero stay zero."""


class Routing(NamedTuple):
    """The experts of each token."""

    weights: torch.Tensor
    """[T, top_k] float32: the weight of each expert's output."""
    experts: torch.Tensor
    """[T, top_k] int32, all different in a row, by descending score"""
    num_experts: int | None = None
    """Number of experts of all ranks, where each rank holds some of them: then `experts` has their
    numbers on this rank, and those outside of its range are others' and add nothing here. None: all
    experts are here."""


class RoutingRule(NamedTuple):
    """How experts are chosen from a router's logits.

    An expert's score is a function of its logits (`scoring`). The experts with the largest sums of
    score and `bias` are chosen; scores without bias are the weights. Sources: DeepSeek-V3 (arXiv
    2412.19437) for sigmoid, bias and groups, DeepSeek-V2 (arXiv 2405.04434) for groups without
    bias.
    """

    top_k: int
    """Number of experts per token."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """"softmax": over all experts; "sigmoid": of each logit."""
    renormalize: bool = False
    """The weights of a token are divided by their sum."""
    bias: torch.Tensor | None = None
    """[num_experts] float32"""
    groups: int = 1
    """Number of groups of equal size that the experts are in, in order."""
    top_groups: int = 1
    """Number of groups per token that experts are chosen from: those with the largest sum of their
    two largest scores (with bias), or without a bias, with the largest score."""
    factor: float = 1.0
    """Factor of all weights, applied last."""
    first: int = 0
    """Expert from which the numbers of those chosen are counted: the first one of this rank."""

    @property
    def features(self) -> frozenset[str]:
        """Return the names, as in `Operations.features`, of what the rule needs."""
        return frozenset(self._features())

    def _features(self) -> Iterator[str]:
        if self.scoring != "softmax":
            yield f"route.{self.scoring}"
        if self.bias is not None:
            yield "route.bias"
        if self.groups > 1:
            yield "route.groups"
        if self.factor != 1.0:
            yield "route.factor"
        if self.first:
            yield "route.first"


def choose_experts(logits: torch.Tensor, rule: RoutingRule) -> Routing:
    """logits: [T, num_experts]; of equal scores, the lower number is chosen."""
    wide = logits.float()
    scores = wide.sigmoid() if rule.scoring == "sigmoid" else wide.softmax(dim=-1)
    choice = scores if rule.bias is None else scores + rule.bias
    if rule.groups > 1:
        choice = _in_best_groups(choice, rule)
    order = choice.sort(dim=-1, descending=True, stable=True)
    experts = order.indices[:, : rule.top_k]
    weights = scores.gather(1, experts)
    if rule.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    experts = experts.to(torch.int32) - rule.first
    return Routing(weights * rule.factor, experts.contiguous())


def _in_best_groups(choice: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Set scores outside a token's best groups to -inf: [T, num_experts] → the same shape."""
    grouped = choice.unflatten(1, (rule.groups, -1))
    counted = 1 if rule.bias is None else min(2, grouped.shape[2])
    totals = grouped.topk(counted, dim=-1).values.sum(dim=-1)
    best = totals.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
    outside = torch.ones_like(totals, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[:, :, None], float("-inf")).flatten(1)
