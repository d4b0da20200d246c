"""Attention in plain torch, on any device: the reference that other backends are measured by.

Decode rows are gathered and padded together; longer rows go one by one. All row lengths come from
the host, so nothing waits for a GPU.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...core.nn.context import BatchLayout
from ...core.protocols import AttentionSpec

GATHER_TOKENS = 1 << 17
"""Cached tokens gathered at once for decode rows."""


class TorchAttention:
    """Any head size, any block size, sliding window, soft cap."""

    name: ClassVar[str] = "torch"
    graph_safe: ClassVar[bool] = False

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """Everywhere."""
        return None

    def __init__(self, *, device: torch.device, dtype: torch.dtype, block_size: int, **_: int):
        self.device = device
        self.block_size = block_size

    def build_metadata(self, layout: BatchLayout) -> BatchLayout:
        return layout

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: BatchLayout,
    ) -> torch.Tensor:
        """Write to the cache, then attend; see `protocols.AttentionBackend`."""
        layout = metadata
        kv_cache.flatten(1, 2)[:, layout.slot_mapping] = torch.stack((key, value)).to(
            kv_cache.dtype
        )
        out = torch.empty_like(query)
        starts, lengths = layout.query_start_cpu, layout.seq_lens_cpu
        num_decodes = 0
        while num_decodes < layout.num_rows and starts[num_decodes + 1] - starts[num_decodes] == 1:
            num_decodes += 1
        begin = 0
        while begin < num_decodes:
            end, longest = begin, 0
            while end < num_decodes:
                longest = max(longest, int(lengths[end]))
                if end > begin and longest * (end + 1 - begin) > GATHER_TOKENS:
                    break
                end += 1
            most = int(lengths[begin:end].max())
            keys, values = self._gather(kv_cache, layout.block_table[begin:end], most)
            out[begin:end] = _attend(
                spec,
                query[begin:end, None],
                keys,
                values,
                layout.seq_lens[begin:end, None].long() - 1,
            )[:, 0]
            begin = end
        for row in range(num_decodes, layout.num_rows):
            first, last = int(starts[row]), int(starts[row + 1])
            length = int(lengths[row])
            keys, values = self._gather(kv_cache, layout.block_table[row : row + 1], length)
            positions = torch.arange(length - (last - first), length, device=query.device)
            out[first:last] = _attend(spec, query[None, first:last], keys, values, positions[None])[
                0
            ]
        return out

    def _gather(
        self, kv_cache: torch.Tensor, table: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """→ keys, values [rows, length, num_kv_heads, head_dim]"""
        blocks = table[:, : -(-length // self.block_size)].long()
        gathered = kv_cache[:, blocks].flatten(2, 3)[:, :, :length]
        return gathered[0], gathered[1]


def _attend(
    spec: AttentionSpec,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """query: [rows, Q, heads, dim] at positions [rows, Q]; keys, values: [rows, K, kv_heads, dim]."""
    group = spec.num_heads // spec.num_kv_heads
    rows, count = query.shape[:2]
    q = query.float().view(rows, count, spec.num_kv_heads, group, spec.head_dim)
    scores = torch.einsum("rqhgd,rkhd->rhgqk", q, keys.float()) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    place = torch.arange(keys.shape[1], device=query.device)
    visible = place <= positions[..., None]
    if spec.sliding_window is not None:
        visible &= place > positions[..., None] - spec.sliding_window
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    # What lies past a row's end is somebody else's, or was never written: keep even NaN out.
    inside = visible.any(1)[:, :, None, None]
    weighted = torch.einsum(
        "rhgqk,rkhd->rqhgd",
        scores.softmax(-1),
        torch.where(inside, values.float(), 0.0),
    )
    return weighted.reshape(query.shape).to(query.dtype)
