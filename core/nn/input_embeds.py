"""Rows in the place of token embeddings, and positions of three axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..protocols.attention import AttentionSpec
from ..protocols.media import RopeSections
from .spans import Span

if TYPE_CHECKING:
    from .rotary import Rotary


class EmbeddedRows(NamedTuple):
    """Rows of the encoder's output that stand among a step's tokens, K of them."""

    tokens: torch.Tensor
    """[K] int64: the step's token of each."""
    vectors: torch.Tensor
    """[K, (1 + levels) * hidden_size]"""


class RopePositions(NamedTuple):
    """By which positions the step's tokens turn."""

    positions: torch.Tensor
    """[T] int64, or [3, T] where the axes differ."""
    sections: RopeSections

    def rotation(self, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions, and the table that they index, as `Operations.heads` takes them."""
        table = rotary.cos_sin
        if self.positions.dim() == 1:
            return self.positions, table
        axes = self._axes(rotary.rotary_dim // 2).to(table.device)
        count = self.positions.shape[1]
        turns = table[self.positions].view(3, count, 2, -1)
        index = axes.expand(count, 2, -1)[None]
        own = turns.gather(0, index).view(count, -1)
        return torch.arange(count, device=table.device), own

    def _axes(self, num_pairs: int) -> torch.Tensor:
        """Return each pair's axis, [num_pairs] int64."""
        sizes, pairs = self.sections.sizes, torch.arange(num_pairs)
        if not self.sections.interleaved:
            return torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
        axes = torch.zeros(num_pairs, dtype=torch.int64)
        for axis in (1, 2):
            axes[(pairs % 3 == axis) & (pairs < 3 * sizes[axis])] = axis
        return axes


class InputEmbedsContext(NamedTuple):
    """What layers know of a step's tokens that stand for items."""

    rows: EmbeddedRows | None
    """None: the step has no tokens of items."""
    rope: RopePositions | None
    """None: tokens turn by their positions in the sequence."""
    spans: Sequence[Span] = ()
    """Tokens that see each other in both directions."""
    block_size: int = 0
    windowed: bool = False
    """They do so in layers with a sliding window alone."""

    def spans_of(self, spec: AttentionSpec) -> Sequence[Span]:
        """Return the spans of a layer."""
        return () if self.windowed and spec.sliding_window is None else self.spans

    def identified(self, input_ids: torch.Tensor, token_id: int) -> torch.Tensor:
        """Put a token's id in the place of those of tokens that have rows."""
        if self.rows is None:
            return input_ids
        return input_ids.index_fill(0, self.rows.tokens, token_id)

    def embedded(self, hidden: torch.Tensor) -> torch.Tensor:
        """Put rows in the place of embeddings: [T, hidden_size] → the same shape."""
        if self.rows is None:
            return hidden
        return hidden.index_copy(0, self.rows.tokens, self._level(0, hidden))

    def after_layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Add the rows of a decoder layer to what it has returned."""
        if self.rows is None or (layer + 2) * hidden.shape[1] > self.rows.vectors.shape[1]:
            return hidden
        return hidden.index_add(0, self.rows.tokens, self._level(layer + 1, hidden))

    def _level(self, level: int, hidden: torch.Tensor) -> torch.Tensor:
        assert self.rows is not None
        size = hidden.shape[1]
        return self.rows.vectors[:, level * size : (level + 1) * size].to(hidden.dtype)
