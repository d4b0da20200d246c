"""Attention on a Triton kernel whose result for a query does not depend on the step it is in.

Decode rows, drafts, prompts and their chunks all take the kernel for prompts, with tiles of one
size, which adds a query's keys in order in one program: no sum is split among programs. A decode
row with a long context thus has as many programs as key heads, and takes longer.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from ...core.nn.context import BatchLayout
from ...core.nn.kv_cache.quantized_cache import KVCache
from ...core.protocols.attention import AttentionSpec, ProjectedLayer
from .triton import TritonAttention, TritonMetadata, layer_arguments

try:
    from ...kernels.attention.paged_attention_prefill import paged_attention_prefill
except ImportError:
    pass  # `supports` says why.


class InvariantTritonAttention(TritonAttention):
    name: ClassVar[str] = "triton_invariant"
    batch_invariant: ClassVar[bool] = True
    compacted_cache: ClassVar[bool] = False
    leveled_cache: ClassVar[bool] = False

    def build_metadata(self, layout: BatchLayout) -> TritonMetadata:
        return TritonMetadata(layout, 0, ())

    def prefers_launch(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> bool:
        return False

    def plan_projection(self, layer: ProjectedLayer) -> None:
        return None

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        metadata: TritonMetadata,
        *,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout = metadata.layout
        return paged_attention_prefill(
            query,
            kv_cache,
            layout.block_table,
            layout.query_start,
            layout.seq_lens,
            **layer_arguments(spec),
            max_query_len=layout.max_query_len,
            alibi_slopes=None if spec.alibi_slopes is None else self._slopes(spec.alibi_slopes),
            distance_bias=distance_bias,
            sinks=sinks,
            uniform=True,
            out=torch.empty(query.shape, dtype=query.dtype, device=query.device),
        )
