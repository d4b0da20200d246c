"""The last queries of each slot, for KV compressors that score tokens by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...nn.attention import Attention
from ...nn.context import QueryPlaces
from ...step import SlotStart
from ..batch import StepInputs


class QueryRing:
    """A ring per slot and layer: position p is at p modulo its size."""

    def __init__(
        self,
        layers: Sequence[Attention],
        num_slots: int,
        num_queries: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_queries = num_queries
        self._num_slots = num_slots
        self._rings: list[torch.Tensor] = []
        """[num_layers] of [(num_slots + 1) * num_queries, num_heads, head_dim]"""
        self._first_positions = [0] * (num_slots + 1)
        """Slot → first computed position, after prefix hits."""
        for layer in layers:
            shape = (num_slots + 1) * num_queries, layer.spec.num_heads, layer.spec.head_dim
            layer.query_ring = torch.zeros(shape, dtype=dtype, device=device)
            self._rings.append(layer.query_ring)

    def start(self, start: SlotStart) -> None:
        self._first_positions[start.slot] = start.num_computed_tokens

    def places(self, inputs: StepInputs) -> QueryPlaces:
        """Return where the step's queries go."""
        count, layout, slots = self.num_queries, inputs.layout, inputs.slots
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

    def queries(self, layer: int, slot: int, length: int) -> torch.Tensor:
        """Return a slot's last queries after `length` computed tokens, oldest first: [at most
        num_queries, num_heads, head_dim], rotated. Prefix hits leave fewer.
        """
        return self.queries_of_layers(slice(layer, layer + 1), slot, length)[0]

    def queries_of_layers(self, layers: slice, slot: int, length: int) -> torch.Tensor:
        """As `queries`, of several layers: [num_layers, at most num_queries, num_heads, head_dim],
        contiguous.
        """
        count, size = min(self.num_queries, length - self._first_positions[slot]), self.num_queries
        whole = torch.stack([ring[slot * size : (slot + 1) * size] for ring in self._rings[layers]])
        first = (length - count) % size
        return torch.cat((whole[:, first:], whole[:, :first]), dim=1)[:, :count].contiguous()
