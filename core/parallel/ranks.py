"""Ranks, and the groups in which they compute together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Group(Protocol):
    """Ranks that compute each layer together. Every rank calls the same methods in the same order,
    with tensors of the same shape and type."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of `x` over all ranks, plus the residual, which is the same on all: the
        same bits on each, [any] → the same shape. Both may be overwritten."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, joined in the last dimension, by rank: [..., n] → [...,
        size * n]"""


@dataclass(frozen=True)
class OneRank:
    """The group of a rank that computes alone."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x`, plus the residual."""
        return x if residual is None else residual.add_(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


class PausableGroup:
    """A group whose calls can be left out for a while: what is computed meanwhile is of no use."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.paused = False
        self._group = group

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """While paused, return `x`, plus the residual."""
        if self.paused:
            return x if residual is None else residual.add_(x)
        return self._group.all_reduce(x, residual)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """While paused, return `x` as the part of every rank."""
        if self.paused:
            return x.repeat(*[1] * (x.dim() - 1), self.size)
        return self._group.all_gather(x)


class Product(Protocol):
    """A layer that is divided by its input features, so that each rank computes one term."""

    def __call__(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Ranks:
    """The groups that this rank belongs to."""

    tensor: Group = OneRank()
    """Ranks that each hold a part of every layer (tensor parallelism)."""
    local_rank: int = 0
    """Number of this rank among those of its host, and of its device."""

    def pausable(self) -> Ranks:
        """Return the same ranks, whose calls `pause` leaves out."""
        return self if self.tensor.size == 1 else replace(self, tensor=PausableGroup(self.tensor))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which this rank computes without the others, and may do so more or less often
        than they."""
        group = self.tensor
        if isinstance(group, PausableGroup):
            group.paused = True
        try:
            yield
        finally:
            if isinstance(group, PausableGroup):
                group.paused = False

    def all(self, done: bool, device: torch.device) -> bool:
        """Return whether `done` is true on all ranks. `device`: that of their tensors."""
        return bool(self.minimum(int(done), device))

    def minimum(self, value: int, device: torch.device) -> int:
        """Return the smallest `value` of all ranks. `device`: that of their tensors."""
        if self.tensor.size == 1:
            return value
        import torch

        values = self.tensor.all_gather(torch.tensor([value], device=device))
        return int(values.min())

    def add(
        self, residual: torch.Tensor | None, *products: tuple[Product, torch.Tensor]
    ) -> torch.Tensor:
        """Return residual + the sum of all products, each (layer, its input), over all ranks.

        The residual is added once, after the sum, and may be overwritten. One rank passes it
        through the layers, which may add it in their own kernels.
        """
        alone = self.tensor.size == 1
        total = residual if alone else None
        for layer, x in products:
            total = layer(x, residual=total)
        assert total is not None, "there is at least one product"
        if alone:
            return total
        return self.tensor.all_reduce(total, residual)


ONE_RANK = Ranks()
"""A rank that computes alone."""
