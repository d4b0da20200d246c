"""Operations of an indexer by Triton kernels."""

from __future__ import annotations

import torch

from ...core.nn.latent.index_operations import IndexOperations
from ...core.protocols.latent_attention import ChosenTokens
from ...kernels.indexer.index_choice import choose_cached_tokens
from ...kernels.indexer.index_inputs import index_inputs

SCORES = 1 << 26
"""Most scores at once: 256 MiB."""


class TritonIndexing(IndexOperations):
    """One launch for keys and queries; two for each part of a step's queries that fits the
    workspace, three for few long rows.
    """

    cached_index_keys = staticmethod(index_inputs)

    def __init__(self) -> None:
        super().__init__()
        self._scores: dict[torch.device, torch.Tensor] = {}

    def choose_cached_tokens(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        positions: torch.Tensor,
        *,
        topk: int,
        max_seq_len: int,
    ) -> ChosenTokens:
        device = query.device
        if device not in self._scores:  # Never replaced: captured graphs hold its address.
            self._scores[device] = torch.empty(SCORES, dtype=torch.float32, device=device)
        return ChosenTokens(
            *choose_cached_tokens(
                query, weights, cache, block_table, query_start, positions, topk=topk,
                max_seq_len=max_seq_len, workspace=self._scores[device],
            )
        )  # fmt: skip
