"""Plain adapters on the device: rank rows of all sites in one matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...nn.adapter_sites import Site
from ...nn.step_operations.adapters import SiteWeights
from ...parts.adapters import RANK_UNIT, num_units
from ..kv_cache.memory import zeros
from .host_change import HostChange
from .layer_shapes import in_features, part_bounds
from .sites import Sites

ALIGNMENT = 16
"""Numbers to whose multiple the matrices of a rank row begin."""


class SiteLayout(NamedTuple):
    """Where a site's matrices stand in a rank row."""

    site: Site
    a: int
    """First of [parts, in_features]"""
    b: int
    """First of [out_features]"""
    in_features: int
    bounds: tuple[int, ...]
    column: int
    """First of its parts among those of all sites."""

    @property
    def num_parts(self) -> int:
        return len(self.bounds) - 1


class RankRows(NamedTuple):
    """A plain adapter in host memory, in the form of the pool."""

    rows: torch.Tensor
    """[units * RANK_UNIT, width]"""
    ranks: torch.Tensor
    """[columns] int32"""
    scales: torch.Tensor
    """[columns] float32"""

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.ranks.nbytes + self.scales.nbytes


class AdapterPool:
    """The rank rows of resident adapters, and the tables that say whose they are.

    Row i of the matrix has one rank of one adapter, of all sites: what an adapter takes is one copy
    for each unit.
    """

    def __init__(self, sites: Sites, dtype: torch.dtype, max_adapters: int, max_rank: int) -> None:
        """Lay out the sites. max_adapters: that are there at once with the largest rank; more, if
        their ranks are smaller."""
        self.dtype, self.max_rank = dtype, max_rank
        self.num_units = max_adapters * num_units(max_rank)
        self.layouts: list[SiteLayout] = []
        at = column = 0
        for site, layer in sites.linear():
            bounds, width = part_bounds(layer), in_features(layer)
            parts = len(bounds) - 1
            b = at + _aligned(parts * width)
            self.layouts.append(SiteLayout(site, at, b, width, bounds, column))
            at, column = b + _aligned(bounds[-1]), column + parts
        self.width, self.num_columns = at, column
        self.nbytes = self.num_units * (RANK_UNIT * self.width * dtype.itemsize + 8 * column)
        self.nbytes += 4 * self.num_units * max_rank

    def allocate(self, device: torch.device) -> None:
        """Take the memory, and let the sites have their parts of it."""
        units, rows = self.num_units, self.num_units * RANK_UNIT
        self.matrix = zeros((rows, self.width), self.dtype, device)
        self.rank_rows = torch.zeros(units, self.max_rank, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(units, self.num_columns, dtype=torch.int32, device=device)
        self.scales = torch.zeros(units, self.num_columns, dtype=torch.float32, device=device)
        for each in self.layouts:
            parts = each.num_parts
            columns = slice(each.column, each.column + parts)
            a = self.matrix[:, each.a : each.a + parts * each.in_features]
            each.site.weights = SiteWeights(
                a=a.view(rows, parts, each.in_features),
                b=self.matrix[:, each.b : each.b + each.bounds[-1]],
                bounds=each.bounds,
                rank_rows=self.rank_rows,
                ranks=self.ranks[:, columns],
                scales=self.scales[:, columns],
            )

    def pack(self, changes: Mapping[str, HostChange], *, pinned: bool) -> RankRows:
        """Return a plain adapter in the form of the pool."""
        most = max((p.a.shape[0] for each in changes.values() for p in each.pieces), default=0)
        rows = torch.zeros(
            num_units(most) * RANK_UNIT, self.width, dtype=self.dtype, pin_memory=pinned
        )
        ranks = torch.zeros(self.num_columns, dtype=torch.int32, pin_memory=pinned)
        scales = torch.zeros(self.num_columns, dtype=torch.float32, pin_memory=pinned)
        for each in self.layouts:
            change = changes.get(each.site.key)
            for piece in () if change is None else change.pieces:
                rank, first = piece.a.shape[0], each.a + piece.part * each.in_features
                rows[:rank, first : first + each.in_features] = piece.a
                rows[:rank, each.b + piece.span.start : each.b + piece.span.stop] = piece.b.t()
                ranks[each.column + piece.part] = rank
                scales[each.column + piece.part] = piece.scale
        return RankRows(rows, ranks, scales)

    def load(self, adapter: RankRows | None, place: int, units: Sequence[int]) -> torch.Tensor:
        """Queue the copy of an adapter to its units; None: of one without rank rows. Return what
        must stay until the copy is done."""
        if adapter is None:
            self.ranks[place].zero_()
            return self.ranks
        firsts = np.asarray(units, dtype=np.int32)[:, None] * RANK_UNIT
        numbers = (firsts + np.arange(RANK_UNIT)).astype(np.int32).reshape(-1)
        table = torch.zeros(self.max_rank, dtype=torch.int32, pin_memory=adapter.rows.is_pinned())
        count = min(len(numbers), self.max_rank)
        table[:count] = torch.from_numpy(numbers[:count])
        for number, unit in enumerate(units):
            own = slice(number * RANK_UNIT, (number + 1) * RANK_UNIT)
            there = slice(unit * RANK_UNIT, (unit + 1) * RANK_UNIT)
            self.matrix[there].copy_(adapter.rows[own], non_blocking=True)
        self.rank_rows[place].copy_(table, non_blocking=True)
        self.ranks[place].copy_(adapter.ranks, non_blocking=True)
        self.scales[place].copy_(adapter.scales, non_blocking=True)
        return table


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
