"""Some rows of a step, in chunks that bound temporaries."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .step_stages import Rows

CHUNK_ELEMENTS = 1 << 24
"""Most numbers in a wide temporary."""


def select(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    return values if rows.batch is None else values.index_select(0, rows.batch)


def take(values: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return a view for a slice, a copy for indices."""
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)


def put(target: torch.Tensor, rows: slice | torch.Tensor, part: torch.Tensor) -> None:
    """Write rows back, unless `part` is a changed view."""
    if not isinstance(rows, slice):
        target.index_copy_(0, rows, part)
    elif target[rows].data_ptr() != part.data_ptr():
        target[rows].copy_(part)


def slices(count: int, width: int) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def chunks(rows: Rows, work: torch.Tensor) -> Iterator[slice | torch.Tensor]:
    """Yield the rows as indices into `work`, in bounded chunks."""
    for part in slices(rows.count, work.shape[1]):
        yield part if rows.batch is None else rows.batch[part]


def table_chunks(
    batch: torch.Tensor | None, table: torch.Tensor, work: torch.Tensor
) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
    for part in slices(table.shape[0], work.shape[1]):
        yield (part if batch is None else batch[part]), table[part]
