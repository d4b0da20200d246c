"""Attention as the textbook has it: one row after another, softmax(q kᵀ) v, all in float32.

Slow, and easy to compare with: nothing here is clever.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch

from jackfield.core.nn.context import BatchLayout
from jackfield.core.protocols import AttentionSpec


class Row(NamedTuple):
    """One request's share of a step."""

    first: int
    """Its tokens are [first, end) of the step's."""
    end: int
    length: int
    """Tokens it has in the cache, this step's included."""
    blocks: torch.Tensor
    """[ceil(length / block_size)]: where in the cache they are."""


class PlainAttention:
    """`jackfield.core.protocols.AttentionBackend`, any device, any floating dtype."""

    name: ClassVar[str] = "plain"
    graph_safe: ClassVar[bool] = False
    standard_cache: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can serve this layer here, else the reason why not, in one clause."""
        if not dtype.is_floating_point:
            return f"dtype {dtype} is no floating point"
        unknown = [
            field
            for field in spec.__struct_fields__
            if field not in KNOWN and getattr(spec, field) not in (None, False)
        ]
        return f"it does not know of {', '.join(unknown)}" if unknown else None

    def __init__(self, *, block_size: int, **options: Any) -> None:
        """Of what the protocol gives, the size of a block is all that is needed."""
        self.block_size = block_size

    def build_metadata(self, layout: BatchLayout) -> list[Row]:
        """The step's rows; the numpy twins are read, so that no device is waited for."""
        starts = layout.query_start_cpu.tolist()
        rows = []
        for number, length in enumerate(layout.seq_lens_cpu[: layout.num_rows].tolist()):
            used = -(-length // self.block_size)
            blocks = layout.block_table[number, :used]
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
            scores *= spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            scores.masked_fill_(~visible(spec, row, query.device), float("-inf"))
            heads = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            out[row.first : row.end] = heads.to(out.dtype)
        return out


KNOWN = ("num_heads", "num_kv_heads", "head_dim", "scale", "sliding_window", "soft_cap")
"""Fields of AttentionSpec that `forward` honours; another one, set, is refused."""


def visible(spec: AttentionSpec, row: Row, device: torch.device) -> torch.Tensor:
    """[queries, row.length] bool: each query sees itself and what is before it in its window."""
    places = torch.arange(row.length, device=device)
    queries = places[row.length - (row.end - row.first) :, None]
    seen = places <= queries
    if spec.sliding_window is not None:
        seen &= places > queries - spec.sliding_window
    return seen
