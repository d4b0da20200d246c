"""Token embeddings, and the head that may share them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.sharding import Sharding
from .context import BuildContext
from .layer_operations.products import PositionRows, with_positions
from .norm import before_product


class Embedding(nn.Module):
    """weight: [vocab_size, hidden_size]; bias: [vocab_size], of a head that has one.

    With several ranks and `shard`, each holds the rows of as many tokens, zeros after the last one.
    """

    shardings: dict[str, Sharding]
    """As `Linear.shardings`."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        build: BuildContext,
        *,
        bias: bool = False,
        shard: Literal["vocabulary"] | None = None,
    ) -> None:
        super().__init__()
        self.group = build.ranks.tensor
        self.operations, self.shardings, self.vocab_size = build.operations, {}, vocab_size
        self.own: slice | None = None
        """This rank's tokens; None: all of them."""
        self.gathers = True
        """Whether `logits` are those of all ranks' tokens, or of this rank's alone."""
        rows = vocab_size
        if shard is not None and self.group.size > 1:
            rows = -(-vocab_size // self.group.size)
            start = min(self.group.rank * rows, vocab_size)
            self.own = slice(start, min(start + rows, vocab_size))
            padding = rows - (self.own.stop - self.own.start)
            sharding = Sharding(0, {"": vocab_size}, {"": (self.own,)}, padding)
            self.shardings = {"weight": sharding, "bias": sharding}
        self.weight = nn.Parameter(build.weight(rows, hidden_size))
        self.bias = nn.Parameter(build.empty(rows)) if bias else None

    def forward(
        self,
        token_ids: torch.Tensor,
        *,
        factor: float = 1.0,
        positions: PositionRows | None = None,
    ) -> torch.Tensor:
        """factor * weight[token_ids], plus the rows of the positions: [num_tokens] → [num_tokens,
        hidden_size]"""
        if self.own is None:
            embed = self.operations.embed
            return embed(token_ids, self.weight, factor=factor, positions=positions)
        others = (token_ids < self.own.start) | (token_ids >= self.own.stop)
        rows = F.embedding((token_ids - self.own.start).masked_fill(others, 0), self.weight)
        rows = self.group.all_reduce(rows.masked_fill_(others[:, None], 0.0))
        return with_positions(rows, factor, positions)

    def logits(
        self, hidden: torch.Tensor, *, norm: nn.Module | None = None, factor: float = 1.0
    ) -> torch.Tensor:
        """Compute logits times `factor`, tied or not: [num_rows, hidden_size] → [num_rows,
        vocab_size]; without `gathers`, those of this rank's rows, padding included."""
        hidden, fused = before_product(hidden, norm, self.operations)
        linear, weights = self.operations.linear, (self.weight, self.bias)
        if factor == 1.0:
            logits = linear(hidden, *weights, norm=fused)
        elif "linear.factor" in self.operations.features:
            logits = linear(hidden, *weights, norm=fused, factor=factor)
        else:
            logits = linear(hidden, *weights, norm=fused).mul_(factor)
        if self.own is None or not self.gathers:
            return logits
        return self.group.all_gather(logits)[:, : self.vocab_size]
