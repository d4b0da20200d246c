"""Attention in plain torch for the CPU, in which a query's result depends on its sequence alone.

Each query is computed by itself, in calls whose shapes follow from its position: a prompt in one
step, in chunks, after cached tokens or as drafts gives the same bits as decoding it. It gathers the
cache once for each query.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...core.nn.kv_cache.quantized_cache import KVCache
from ...core.protocols.attention import AttentionSpec
from .torch import Extras, TorchAttention, TorchMetadata, attend, gather


class InvariantTorchAttention(TorchAttention):
    name: ClassVar[str] = "torch_invariant"
    batch_invariant: ClassVar[bool] = True
    compacted_cache: ClassVar[bool] = False
    leveled_cache: ClassVar[bool] = False

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return "it is for the CPU"
        return super().supports(spec, device, dtype)

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        metadata: TorchMetadata,
        *,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        extras = Extras.of(spec, sinks, distance_bias, query.device)
        for row, seq_len in enumerate(metadata.seq_lens):
            first, end = metadata.starts[row], metadata.starts[row + 1]
            table = metadata.layout.block_table[row]
            for token in range(first, end):
                position = seq_len - end + token
                out[token] = self._of_query(spec, query[token], kv_cache, table, position, extras)
        return out

    def _of_query(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        table: torch.Tensor,
        position: int,
        extras: Extras,
    ) -> torch.Tensor:
        """query: [num_heads, head_dim]; table: the row's blocks → query's shape"""
        reach = spec.reach
        first = 0 if reach is None else max(reach.first_visible(position), 0)
        first_block = first // self.block_size
        origin = first_block * self.block_size
        blocks = table[first_block : position // self.block_size + 1]
        # [1, num_kv_heads, keys, head_dim]
        keys, values = (
            part.flatten(0, 1)[first - origin : position + 1 - origin].transpose(0, 1)[None]
            for part in gather(spec, kv_cache, blocks, query.dtype)
        )
        distance = position - torch.arange(first, position + 1, device=query.device)
        bias = extras.by_distance(distance)
        attended = attend(
            spec,
            # All query heads of a kv head see the same keys: they are rows of one product.
            query.clone().view(1, spec.num_kv_heads, -1, spec.head_dim),
            keys,
            values,
            torch.ones_like(distance, dtype=torch.bool)[None, None, None].expand(
                -1, 1, spec.num_heads // spec.num_kv_heads, -1
            ),
            bias=bias,
            sinks=extras.sinks,
        )
        return attended.view(spec.num_heads, spec.head_dim)
