"""A rank's part of a parameter, as data, and the division of features and heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ..errors import ConfigError, LoadError
from .ranks import Group

if TYPE_CHECKING:
    import torch


Features: TypeAlias = Literal["out", "in"]
"""A weight's dimension 0 or 1."""
FEATURES: tuple[Features, ...] = ("out", "in")


@dataclass(frozen=True)
class Sharding:
    """The part of checkpoint tensors in a rank's parameter."""

    dim: int
    """Sharded dimension."""
    sizes: Mapping[str, int]
    """Shard name → size of that dimension; "": unnamed."""
    slices: Mapping[str, tuple[slice, ...]]
    """Shard name → this rank's slices, in its parameter's order."""
    padding: int = 0
    """Zeros at the end."""
    kept: bool = True
    """False: zeros here, as another rank holds the tensor."""

    def part(self, shard: str | None, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part. Raises LoadError for another size."""
        if not self.kept:
            return tensor.new_zeros(tensor.shape)
        name = shard if shard is not None and shard in self.sizes else ""
        if tensor.dim() <= self.dim or tensor.shape[self.dim] != self.sizes[name]:
            raise LoadError(
                f"has shape {tuple(tensor.shape)}, and ranks divide {self.sizes[name]} in "
                f"dimension {self.dim}"
            )
        parts = [tensor[(slice(None),) * self.dim + (piece,)] for piece in self.slices[name]]
        if self.padding:
            shape = list(tensor.shape)
            shape[self.dim] = self.padding
            parts.append(tensor.new_zeros(shape))
        return parts[0] if len(parts) == 1 else _joined(parts, self.dim)

    def over(self, dim: int, unit: int) -> Sharding:
        """Return the sharding of a tensor with an element per `unit` features. Raises ConfigError
        for fractions, or unit 0.
        """
        for name, pieces in self.slices.items():
            whole = self.sizes[name]
            ends = [end for piece in pieces for end in (piece.start, piece.stop) if end != whole]
            if not unit or any(end % unit for end in ends):
                raise ConfigError(
                    f"tensor_parallel_size: {whole} features are divided at {ends}, and the "
                    + (f"checkpoint stores {unit} together" if unit else "checkpoint mixes them"),
                    param="tensor_parallel_size",
                )
        return Sharding(
            dim,
            {name: -(-size // unit) for name, size in self.sizes.items()},
            {
                name: tuple(slice(piece.start // unit, -(-piece.stop // unit)) for piece in pieces)
                for name, pieces in self.slices.items()
            },
        )


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    import torch

    return torch.cat(list(parts), dim=dim)


def even_slice(size: int, group: Group, what: str = "features", unit: int = 1) -> slice:
    """Return the rank's share of `size`. Raises ConfigError if uneven: up to whole units, where a
    format stores `unit` together.
    """
    units = -(-size // unit)
    if unit > 1 and size % (unit * group.size) and units >= group.size:
        each, more = divmod(units, group.size)
        ends = [(each * rank + min(rank, more)) * unit for rank in (group.rank, group.rank + 1)]
        return slice(ends[0], min(ends[1], size))
    if size % group.size:
        raise ConfigError(
            f"tensor_parallel_size: {size} {what} of this model cannot be divided by {group.size}; "
            f"{_below(size, group.size)} can",
            param="tensor_parallel_size",
        )
    share = size // group.size
    return slice(group.rank * share, (group.rank + 1) * share)


def _below(size: int, ranks: int) -> int:
    return next(count for count in range(ranks - 1, 0, -1) if size % count == 0)


def length(pieces: Sequence[slice]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


class HeadShare(NamedTuple):
    """A rank's attention heads."""

    queries: slice
    keys: slice
    """Key and value heads; with fewer than ranks, some share one."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, group: Group) -> HeadShare:
        """Raises ConfigError if the heads cannot be divided."""
        queries = even_slice(num_heads, group, "attention heads")
        if group.size <= num_kv_heads or math.gcd(group.size, num_kv_heads) != num_kv_heads:
            return cls(queries, even_slice(num_kv_heads, group, "key-value heads"))
        head = group.rank // (group.size // num_kv_heads)
        return cls(queries, slice(head, head + 1))

    @property
    def num_heads(self) -> int:
        return length([self.queries])

    @property
    def num_kv_heads(self) -> int:
        return length([self.keys])

    def rows(self, head_dim: int) -> dict[str, slice]:
        """Return rows of the query, key and value projections."""
        queries, keys = (
            slice(heads.start * head_dim, heads.stop * head_dim)
            for heads in (self.queries, self.keys)
        )
        return {"q": queries, "k": keys, "v": keys}
