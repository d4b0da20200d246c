"""Checks of adapters' operations, for `OperationsKit`: which tokens have which, and their sums."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ...core.nn.step_operations.adapters import (
    CHUNK_TOKENS,
    AdapterChunks,
    AdapterTables,
    SiteWeights,
    chunk_count,
)
from .operation_arguments import REFERENCE, SIZE, wide

RANKS = ((16, 0, 3), (5, 20, 8), (0, 0, 1), (12, 12, 12), (40, 1, 0))
"""[P][S]"""
BOUNDS = (0, 64, 96, 120)
STEPS = {
    "one token": ([1], 0, 16),
    "decode": ([1] * 70, 2, 16),
    "prompts": ([3, 0, 130, 1, 40, 2, 0], 5, 64),
    "long prompts": ([700, 900, 1], 0, 64),
    "small chunks": ([1, 9, 30], 1, 4),
}
"""Tokens of each row, padding, tokens of a chunk."""


class AdapterChecks:
    """Part of `OperationsKit`."""

    device: Any
    draw: Any
    make: Any
    near: Any
    norm: Any

    @pytest.mark.parametrize("name", STEPS)
    def test_adapter_chunks(self, name: str) -> None:
        """Each token on which an adapter acts is in one chunk, of its adapter; no other is in any.
        Places are any numbers, and rows and the last slot, which padding has, may have none."""
        counts, padding, size = STEPS[name]
        draw = torch.Generator().manual_seed(len(counts))
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tokens, num_slots = int(starts[-1]) + padding, len(counts) + 4
        slots = torch.randperm(num_slots - 1, generator=draw)[: len(counts)]
        choices = torch.tensor([-1, 0, 7, 1000])
        places = choices[torch.randint(0, 4, (num_slots,), generator=draw)].int()
        places[slots[0]], places[-1] = 7, -1
        first = torch.randint(0, 9, (num_slots,), generator=draw)
        first[slots[0]] = 0
        positions = torch.arange(tokens) % 11
        want = {}
        for row, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
            slot = int(slots[row])
            for token in range(begin, end):
                if positions[token] >= first[slot] and places[slot] >= 0:
                    want[token] = int(places[slot])
        count = chunk_count(tokens, 3, size)
        for kind in (torch.int32, torch.int64):
            got = self.make(torch.float32).adapter_chunks(
                slots.to(self.device, kind), starts.to(self.device), positions.to(self.device),
                AdapterTables(places.to(self.device), first.to(self.device)), count, size,
            )  # fmt: skip
            assert got.places.shape == (count,) and got.tokens.shape == (count, size)
            assert got.places.dtype == got.tokens.dtype == torch.int32
            matrices = [
                (token, place)
                for place, listed in zip(got.places.tolist(), got.tokens.tolist(), strict=True)
                for token in listed
                if place >= 0 and token >= 0
            ]
            assert sorted(matrices) == sorted(want.items())

    def site(self, dtype: torch.dtype) -> SiteWeights:
        """Return adapters whose rank rows are anywhere; what no adapter has is NaN."""
        most = max(map(max, RANKS))
        draw = torch.Generator().manual_seed(5)
        order = torch.randperm(most * len(RANKS) + 9, generator=draw)
        pool = self.draw(len(order), 3 * SIZE + BOUNDS[-1], dtype=dtype, seed=1)
        a = pool[:, : 3 * SIZE].view(-1, 3, SIZE).mul_(SIZE**-0.5)
        b = pool[:, 3 * SIZE :].mul_(0.3)
        rank_rows = torch.zeros(len(RANKS), most, dtype=torch.int32)
        unused = torch.ones(len(order), dtype=torch.bool)
        for place, each in enumerate(RANKS):
            rows = order[place * most :][: max(each)]
            rank_rows[place, : max(each)], unused[rows] = rows.int(), False
        pool[unused.to(self.device)] = torch.nan
        # Columns of tables that all sites share, as the pools' are of rows that they share.
        scales = (torch.rand(len(RANKS), 7, generator=draw) + 0.5)[:, 2:5]
        ranks = torch.nn.functional.pad(torch.tensor(RANKS, dtype=torch.int32), (4, 2))[:, 4:-2]
        return SiteWeights(
            a, b, BOUNDS, rank_rows.to(self.device), ranks.to(self.device), scales.to(self.device)
        )

    def chunks(self, places: list[int], size: int) -> AdapterChunks:
        """Return the chunks of tokens with these places, and one that is not used."""
        rows = [(-1, [-1] * size)]
        for place in sorted(set(places) - {-1}):
            own = [token for token, of in enumerate(places) if of == place]
            for start in range(0, len(own), size):
                part = own[start : start + size]
                rows.append((place, part + [-1] * (size - len(part))))
        numbers, tokens = (
            torch.tensor(part, dtype=torch.int32) for part in zip(*rows, strict=True)
        )
        return AdapterChunks(numbers.to(self.device), tokens.to(self.device))

    @pytest.mark.parametrize("tokens", [1, 4, 40, 600])
    def test_add_adapters(self, tokens: int, dtype: torch.dtype) -> None:
        """Adapters of different ranks, some of which lack parts, beside rows without any; inputs
        and outputs are parts of wider tensors. What is not a row's own does not matter to it."""
        operations, site = self.make(dtype), self.site(dtype)
        size = CHUNK_TOKENS if tokens < 512 else 64
        places = [(token * 5 + token // 4) % 6 - 1 for token in range(tokens)]
        places[0] = 1
        x = self.draw(tokens, SIZE + 8, dtype=dtype, seed=3)[:, :SIZE]
        wider = self.draw(tokens, BOUNDS[-1] + 8, dtype=dtype, seed=4)
        base, kept, before = wider[:, : BOUNDS[-1]].clone(), wider.clone(), x.clone()
        chunks, out = self.chunks(places, size), wider[:, : BOUNDS[-1]]
        exact = site._replace(a=site.a.float(), b=site.b.float())
        for kind in (dtype, torch.float32):
            # Rows of another size than the norm makes them.
            norm, large, normed = self.norm(SIZE, kind), x * 3, base.clone()
            operations.add_adapters(normed, large, chunks, site, norm=norm)
            want = base.float().clone()
            REFERENCE.add_adapters(want, large.float(), chunks, exact, norm=wide(norm))
            self.near(normed, want, dtype)
        operations.add_adapters(out, x, chunks, site)
        want = base.float().clone()
        REFERENCE.add_adapters(want, x.float(), chunks, exact)
        assert torch.equal(x, before), "add_adapters overwrites x"
        self.near(out, want, dtype)
        plain = torch.tensor([place < 0 for place in places])
        assert torch.equal(out[plain], base[plain]), "rows without an adapter are written"
        assert torch.equal(wider[:, BOUNDS[-1] :], kept[:, BOUNDS[-1] :])

        # One adapter is NaN, as is an input of another, and rows that have none.
        poisoned = x.clone()
        poisoned[plain] = torch.nan
        lost = torch.tensor([place == 3 for place in places])
        if 4 in places:
            lost[places.index(4)] = True
            poisoned[places.index(4)] = torch.nan
        rows = site.rank_rows[3, : max(RANKS[3])].long()
        spoiled = site._replace(a=site.a.clone(), b=site.b.clone())
        spoiled.a[rows], spoiled.b[rows] = torch.nan, torch.nan
        again = base.clone()
        operations.add_adapters(again, poisoned, chunks, spoiled)
        assert torch.equal(again[~lost], out[~lost]), "a row depends on those beside it"

        # Places have other numbers; chunks and their tokens are in another order.
        turned = torch.tensor([4, 2, 0, 1, 3], device=self.device)
        swapped = site._replace(
            rank_rows=site.rank_rows[turned], ranks=site.ranks[turned], scales=site.scales[turned]
        )
        numbers = torch.where(chunks.places < 0, -1, turned.argsort()[chunks.places.long()]).int()
        moved, again = AdapterChunks(numbers, chunks.tokens), base.clone()
        operations.add_adapters(again, x, moved, swapped)
        assert torch.equal(again, out), "a row depends on its adapter's place"
        moved, again = (
            AdapterChunks(chunks.places.flip(0), chunks.tokens.flip(0, 1).contiguous()),
            base.clone(),
        )
        operations.add_adapters(again, x, moved, site)
        self.near(again, want, dtype)
