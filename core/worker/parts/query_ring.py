"""The last queries of each slot, for KV compressors that score tokens by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...nn.context import QueryPlaces
from ...step import SlotStart
from ..batch import StepInputs
from .compacted_layers import CompactedLayer


class QueryRing:
    """A ring per slot and layer: position p is at p modulo its size."""

    def __init__(
        self,
        layers: Sequence[CompactedLayer],
        num_slots: int,
        num_queries: int,
        device: torch.device,
        dtype: torch.dtype,
        num_drafts: int = 0,
    ) -> None:
        """num_drafts: most per row; rejected ones take places of their own."""
        self.num_queries = num_queries
        self._size = num_queries + num_drafts
        self._num_slots = num_slots
        self._rings: dict[int, torch.Tensor] = {}
        """Number of a layer whose tokens are chosen → [(num_slots + 1) * size, num_heads,
        head_dim]"""
        self._first_positions = [0] * (num_slots + 1)
        """Slot → first computed position, after prefix hits."""
        for number, layer in enumerate(layers):
            if not (layer.recent or layer.drafts):
                shape = ((num_slots + 1) * self._size, *layer.query_shape)
                ring = torch.zeros(shape, dtype=dtype, device=device)
                layer.layer.query_ring = self._rings[number] = ring

    def start(self, start: SlotStart) -> None:
        self._first_positions[start.slot] = start.num_computed_tokens

    def places(self, inputs: StepInputs) -> QueryPlaces:
        """Return where the step's queries go."""
        count, layout, slots = self._size, inputs.layout, inputs.slots
        positions = inputs.positions
        if layout.decode_only and layout.num_tokens == layout.num_rows:
            return QueryPlaces(None, slots * count + positions % count)
        starts, ends = layout.query_start[:-1].long(), layout.query_start[1:].long()
        scratch = self._num_slots * count
        if layout.num_rows * count <= layout.num_tokens:
            tokens = ends[:, None] - 1 - torch.arange(count, device=ends.device)
            kept = tokens >= starts[:, None]
            tokens = tokens.clamp_(min=0)
            places = slots[:, None] * count + positions[tokens] % count
            return QueryPlaces(tokens.flatten(), torch.where(kept, places, scratch).flatten())
        tokens = torch.arange(layout.num_tokens, device=ends.device)
        rows = torch.searchsorted(ends, tokens, right=True).clamp_(max=layout.num_rows - 1)
        places = slots[rows] * count + positions % count
        return QueryPlaces(None, torch.where(tokens >= ends[rows] - count, places, scratch))

    def queries(self, layers: Sequence[int], slot: int, length: int) -> torch.Tensor:
        """Return a slot's last queries after `length` computed tokens in layers that are alike,
        oldest first: [num_layers, at most num_queries, num_heads, head_dim], rotated, contiguous.
        Prefix hits leave fewer.
        """
        count, size = min(self.num_queries, length - self._first_positions[slot]), self._size
        own = slice(slot * size, (slot + 1) * size)
        whole = torch.stack([self._rings[layer][own] for layer in layers])
        first = (length - count) % size
        return torch.cat((whole[:, first:], whole[:, :first]), dim=1)[:, :count].contiguous()
