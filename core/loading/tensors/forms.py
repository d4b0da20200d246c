"""Forms of checkpoint tensors: shards of a merged one, all experts in one, reordered rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ...errors import LoadError


@dataclass(frozen=True)
class Shard:
    """A part of a merged parameter."""

    parameter: str
    """The dotted part that replaces the checkpoint's."""
    name: str
    """Which shard, as the layer's `shards` calls it; "" for the whole of an expert's layer."""


@dataclass(frozen=True)
class StackedExperts:
    """A checkpoint tensor that contains a tensor for every expert: [num_experts, ...]."""

    parameter: str
    """What stands for its name's last part: a layer of all experts, and a parameter of it."""
    names: tuple[str, ...] = ("",)
    """An expert's shards."""
    transposed: bool = False
    """Its rows are the columns here."""
    columns: int | None = None
    """Length of an expert's rows here, where some checkpoints have them as columns: what has
    another is transposed. None: `transposed` says."""
    joined: bool = False
    """The rows of one shard follow all of another's; otherwise rows of all shards take turns."""

    @property
    def least_dims(self) -> int:
        """Return the number of dimensions that such a tensor has at least."""
        return 2 + self.transposed

    def shards(self, tensor: torch.Tensor, first: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """→ shard name, and a view of its part. `first`: number of the tensor's first expert.
        Raises LoadError where there are no experts."""
        if tensor.dim() < self.least_dims:
            raise LoadError(f"has shape {tuple(tensor.shape)}, which is not one of all experts")
        for expert, part in enumerate(tensor, first):
            other = self.columns is not None and part.shape[-1] != self.columns
            rows = part.t() if (self.transposed or other) and part.dim() == 2 else part
            for index, name in enumerate(self.names):
                shard = f"{expert}.{name}" if name else str(expert)
                count = len(self.names)
                yield shard, rows.chunk(count)[index] if self.joined else rows[index::count]


@dataclass(frozen=True)
class RowOrder:
    """A permutation from the row order of a checkpoint's tensor to the model's.

    What depends on sizes is made with the model: `self.weight_map = replace(type(self).weight_map,
    rows={"q_proj": RowOrder.halves(head_dim)})` (`dataclasses.replace`) in its constructor.
    """

    order: tuple[int, ...]
    """Rows are permuted in blocks of len(order), all blocks alike: row i of a block is the
    checkpoint's row order[i] of it."""

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))) or not self.order:
            raise ValueError(f"no order of rows, each of which comes once: {self.order[:8]}…")

    @classmethod
    def halves(cls, head_dim: int, rotary_dim: int | None = None) -> RowOrder:
        """Of heads that turn pairs of neighbours among their first `rotary_dim` rows: half against
        half, which is what `Rotary` turns. For queries and keys alike."""
        rotated = head_dim if rotary_dim is None else rotary_dim
        return cls((*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)))

    @classmethod
    def by_part(cls, num_heads: int, num_parts: int, head_dim: int) -> RowOrder:
        """Of a tensor [num_heads, num_parts (query, key, value), head_dim] to [num_parts,
        num_heads, head_dim]."""
        return cls(tuple(
            (head * num_parts + part) * head_dim + row
            for part in range(num_parts) for head in range(num_heads) for row in range(head_dim)
        ))  # fmt: skip

    def then(self, other: RowOrder) -> RowOrder:
        """Return this order followed by `other`. Raises ValueError unless one length divides the
        other."""
        size = max(len(self.order), len(other.order))
        first, second = self._over(size), other._over(size)
        return RowOrder(tuple(first[row] for row in second))

    def _over(self, size: int) -> list[int]:
        step = len(self.order)
        if size % step:
            raise ValueError(f"orders of {step} and {size} rows do not fit together")
        return [start + row for start in range(0, size, step) for row in self.order]

    @cached_property
    def _index(self) -> torch.Tensor:
        return torch.tensor(self.order)

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """[num_rows, ...] → the same shape. Raises LoadError where the rows are not whole blocks,
        and for what is stored in another form than a row for each output."""
        if tensor.numel() == 1:  # A scale of the whole tensor.
            return tensor
        if name.rpartition(".")[2] not in PER_ROW:
            raise LoadError(
                f"tensor {name!r} is of a layer whose rows are put in another order, which is not "
                "done to a quantized one"
            )
        size = len(self.order)
        if tensor.shape[0] % size:
            raise LoadError(f"tensor {name!r} has {tensor.shape[0]} rows, no multiple of {size}")
        blocks = tensor.reshape(-1, size, *tensor.shape[1:])
        return blocks[:, self._index.to(tensor.device)].reshape(tensor.shape)


PER_ROW = ("weight", "bias", "weight_scale")
"""Name suffixes of tensors with an entry per row, or one."""
