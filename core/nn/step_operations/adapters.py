"""Operations of adapters: a part of `Operations`."""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK_TOKENS = 16
"""Tokens of a chunk in steps of few tokens."""


class AdapterTables(NamedTuple):
    """Which adapter each slot uses, on the device. P = places."""

    slot_places: torch.Tensor
    """[slots] int32: the place of the slot's adapter; -1: it has none. The last slot is padding."""
    slot_starts: torch.Tensor
    """[slots] int64: position from which the adapter acts."""


class AdapterChunks(NamedTuple):
    """A step's tokens in chunks, each of one adapter. Every token with an adapter is in one chunk;
    which, and in which order, changes no result."""

    places: torch.Tensor
    """[C] int32: the place of the chunk's adapter; -1: the chunk is not used."""
    tokens: torch.Tensor
    """[C, tokens of a chunk] int32: the step's tokens; -1: no token."""


class SiteWeights(NamedTuple):
    """The adapters' matrices of one site, whose S parts (such as q, k, v) read the same input."""

    a: torch.Tensor
    """[rank rows, S, in_features]: row i has column i of (B's) ranks: A's row, of each part"""
    b: torch.Tensor
    """[rank rows, out_features]: B's column, of all parts"""
    bounds: tuple[int, ...]
    """[S + 1] Part s has the output features bounds[s] .. bounds[s + 1]."""
    rank_rows: torch.Tensor
    """[P, most ranks] int32: place → the pools' row of each of its ranks. All sites share it."""
    ranks: torch.Tensor
    """[P, S] int32: ranks of each part, the first of the place's; 0: the part has no change."""
    scales: torch.Tensor
    """[P, S] float32"""


def chunk_count(num_tokens: int, max_adapters: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Return the chunks that any tokens of `max_adapters` adapters at most fit in."""
    return min(num_tokens, -(-num_tokens // chunk_tokens) + max_adapters - 1)


class AdapterOperations:
    """Which tokens have which adapter, and what adapters add to a product."""

    def adapter_chunks(
        self,
        slots: torch.Tensor,
        query_start: torch.Tensor,
        positions: torch.Tensor,
        tables: AdapterTables,
        num_chunks: int,
        chunk_tokens: int,
    ) -> AdapterChunks:
        """Divide the tokens of R rows into chunks.

        slots: [R] int32 or int64; query_start: [R + 1] int32, row r has the tokens query_start[r]
        .. query_start[r + 1], those from query_start[R] on are padding; positions: [T] int64.
        Launches do not depend on the values: a graph may record them.
        """
        count = torch.arange(len(positions), device=positions.device, dtype=torch.int32)
        rows = torch.searchsorted(query_start[1:].contiguous(), count, right=True)
        slots = torch.nn.functional.pad(slots, (0, 1), value=len(tables.slot_places) - 1)
        slots = slots[rows].long()
        acts = positions >= tables.slot_starts[slots]
        places = torch.where(acts, tables.slot_places[slots], -1)
        ordered, tokens = places.sort(stable=True)
        # The place in its chunk, and whether a chunk begins, of tokens in order of their adapters.
        first = torch.searchsorted(ordered, ordered, right=False)
        offsets = torch.arange(len(ordered), device=ordered.device) - first
        used = ordered >= 0
        chunks = (used & (offsets % chunk_tokens == 0)).cumsum(0) - 1
        chunks = torch.where(used, chunks, num_chunks)
        out_places = ordered.new_full((num_chunks + 1,), -1, dtype=torch.int32)
        out_tokens = ordered.new_full((num_chunks + 1, chunk_tokens), -1, dtype=torch.int32)
        out_places[chunks] = ordered.int()
        out_tokens[chunks, offsets % chunk_tokens] = tokens.int()
        return AdapterChunks(out_places[:num_chunks], out_tokens[:num_chunks])

    def add_adapters(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        chunks: AdapterChunks,
        site: SiteWeights,
        *,
        norm: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        """out += scale · B (A norm(x)) for the tokens of the chunks, in place; other rows of `out`
        are not written.

        out: [T, out_features]; x: [T, in_features]; norm: an RMSNorm's parameters, a `Norm`. Sums
        are in float32, and `out` is rounded once. The result of a token does not depend on other
        tokens or on where its adapter is.

        The reference computes one adapter at a time.
        """
        for place in chunks.places.unique().tolist():
            if place < 0:
                continue
            tokens = chunks.tokens[chunks.places == place].flatten()
            tokens = tokens[tokens >= 0].long()
            rows = site.rank_rows[place].long()
            wide = x[tokens].float()
            if norm is not None:
                weight, eps = norm
                wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
            for part, rank in enumerate(site.ranks[place].tolist()):
                if not rank:
                    continue
                span = slice(site.bounds[part], site.bounds[part + 1])
                low = wide @ site.a[rows[:rank], part].float().t() * site.scales[place, part]
                delta = low @ site.b[rows[:rank], span].float()
                out[tokens, span] = (out[tokens, span].float() + delta).to(out.dtype)
