"""Operations of adapters by Triton kernels."""

from __future__ import annotations

import torch

from ...core.nn.step_operations.adapters import (
    AdapterChunks,
    AdapterOperations,
    AdapterTables,
    SiteWeights,
)
from ...kernels.adapters.chunks import adapter_chunks
from ...kernels.adapters.expand import expand
from ...kernels.adapters.shrink import shrink
from ...kernels.adapters.tiles import adapter_tiles


class TritonAdapters(AdapterOperations):
    """Chunks of a step's tokens in one launch, of a long prompt's in a few; a site in two."""

    def adapter_chunks(
        self,
        slots: torch.Tensor,
        query_start: torch.Tensor,
        positions: torch.Tensor,
        tables: AdapterTables,
        num_chunks: int,
        chunk_tokens: int,
    ) -> AdapterChunks:
        """Chunks are in the order of places, a chunk's tokens in the step's."""
        return AdapterChunks(
            *adapter_chunks(slots, query_start, positions, *tables, num_chunks, chunk_tokens)
        )

    def add_adapters(
        self, out: torch.Tensor, x: torch.Tensor, chunks: AdapterChunks, site: SiteWeights
    ) -> None:
        """All adapters at once, each with its own ranks. Sums over inputs are divided by the number
        of rows of the step, as those of products are, and by nothing else."""
        if 0 in (*chunks.tokens.shape, site.rank_rows.shape[1]):
            return
        tiles = adapter_tiles(x.shape[0])
        low = shrink(x, *chunks, site.a, site.rank_rows, site.ranks, tiles)
        expand(
            out, low, *chunks, site.b, site.bounds, site.rank_rows, site.ranks, site.scales, tiles
        )
