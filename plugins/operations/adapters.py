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
from ...kernels.rms_norm import rms_norm


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
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        chunks: AdapterChunks,
        site: SiteWeights,
        *,
        norm: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        """All adapters at once, each with its own ranks; the norm of a single row, too. Sums over
        inputs are divided by the number of rows of the step, as those of products are, and by
        nothing else."""
        if 0 in (*chunks.tokens.shape, site.rank_rows.shape[1]):
            return
        if norm is not None and x.shape[0] > 1:
            x, norm = rms_norm(x, *norm), None
        tiles = adapter_tiles(x.shape[0])
        tables = site.rank_rows, site.ranks
        weight = None if norm is None else norm[0]
        low, squares = shrink(x, *chunks, site.a, *tables, tiles, weight)
        after = None if norm is None or squares is None else (squares, x.shape[1], norm[1])
        expand(out, low, *chunks, site.b, site.bounds, *tables, site.scales, tiles, after)
