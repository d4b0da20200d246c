"""Attention as the textbook has it: one row after another, softmax(q kᵀ) v, all in float32.

Slow, and easy to compare with: nothing here is clever.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from jackfield.core.nn.context import BatchLayout
from jackfield.core.protocols import AttentionBackend, AttentionSpec, BackendSetup


class Row(NamedTuple):
    """One request's share of a step."""

    first: int
    """Its tokens are [first, end) of the step's."""
    end: int
    length: int
    """Tokens it has in the cache, this step's included."""
    blocks: torch.Tensor
    """[ceil(length / block_size)]: where in the cache they are."""


class PlainAttention(AttentionBackend):
    """For any device and floating dtype."""

    name: ClassVar[str] = "plain"
    features: ClassVar[frozenset[str]] = frozenset(
        {"sliding_window", "soft_cap", "alibi_slopes", "sinks"}
    )
    """Layers that set another field of the spec never come here."""

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can serve this layer here, else the reason why not, in one clause."""
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_kv_heads} key heads cannot be shared out to {spec.num_heads} heads"
        return None if dtype.is_floating_point else f"dtype {dtype} is no floating point"

    def __init__(self, setup: BackendSetup) -> None:
        """The size of a block is all that is needed."""
        self.block_size = setup.block_size

    def build_metadata(self, layout: BatchLayout) -> list[Row]:
        """The step's rows; the numpy twins are read, so that no device is waited for."""
        starts = layout.query_start_cpu.tolist()
        rows = []
        for number, length in enumerate(layout.seq_lens_cpu[: layout.num_rows].tolist()):
            num_blocks = -(-length // self.block_size)
            blocks = layout.block_table[number, :num_blocks]
            rows.append(Row(starts[number], starts[number + 1], length, blocks))
        return rows

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: list[Row],
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim] → the same shape; keys and values are read from
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        out = torch.zeros_like(query)
        group = spec.num_heads // spec.num_kv_heads
        for row in metadata:
            cached = kv_cache[:, row.blocks].flatten(1, 2)[:, : row.length].float()
            keys, values = cached.repeat_interleave(group, dim=2)
            scores = torch.einsum("qhd,khd->hqk", query[row.first : row.end].float(), keys)
            weights = self.weights(spec, scores * spec.scale, sinks)
            heads = torch.einsum("hqk,khd->qhd", weights, values)
            out[row.first : row.end] = heads.to(out.dtype)
        return out

    def weights(
        self, spec: AttentionSpec, scores: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_heads, queries, keys] scaled products → what each key's value counts."""
        heads, queries, keys = scores.shape
        places = torch.arange(keys, device=scores.device)
        behind = places[keys - queries :, None] - places
        """[queries, keys]: by how many tokens a key comes before a query."""
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, device=scores.device)
            scores = scores - slopes[:, None, None] * behind
        hidden = behind < 0
        if spec.sliding_window is not None:
            hidden |= behind >= spec.sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is None:
            return scores.softmax(-1)
        sink = sinks.float()[:, None, None].expand(heads, queries, 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :keys]
