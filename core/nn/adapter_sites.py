"""What adapters change: of a layer, and of the rows of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .layer_operations.products import Norm
from .operations import Operations
from .step_operations.adapters import AdapterChunks, SiteWeights


class LowRankChange(NamedTuple):
    """What one adapter adds to some of a layer's output features, on the device."""

    span: slice
    """Output features, as this rank has them."""
    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features of the span, rank]"""
    scale: float
    bias: torch.Tensor | None = None
    """[out_features of the span] float32, scaled"""
    gain: torch.Tensor | None = None
    """[out_features of the span] float32, DoRA: factor of the changed product, without the layer's
    own bias."""


@dataclass(frozen=True)
class LayerChange:
    """What one special adapter changes in one layer."""

    low_rank: tuple[LowRankChange, ...] = ()
    weight: torch.Tensor | None = None
    """In place of that of embeddings or a head: [vocab_size, hidden_size]."""
    weights: tuple[tuple[slice, torch.Tensor], ...] = ()
    """In place of a linear layer's, for some output features: [out_features of the span,
    in_features], as this rank has it."""
    biases: tuple[tuple[slice, torch.Tensor], ...] = ()
    """In place of its bias, likewise: [out_features of the span]."""
    token_ids: torch.Tensor | None = None
    """[N] int64: tokens whose rows of an embedding, or logits, are others."""
    token_rows: torch.Tensor | None = None
    """[N, hidden_size]"""
    experts: Mapping[str, SiteWeights] = field(default_factory=dict)
    """"first" or "down" → what is added to the products of all experts; places are the numbers of
    experts as this rank counts."""

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
                ) -> torch.Tensor:  # fmt: skip
        """Return the changed result of a linear layer, in float32.

        x: [N, in_features]; out: the layer's result, with `bias`, [N, out_features].
        """
        wide = out.float()
        own = wide.new_zeros(wide.shape[1]) if bias is None else bias.float().clone()
        weights = self.weights if self.weight is None else ((slice(None), self.weight),)
        for span, weight in weights:
            wide[:, span] = F.linear(x, weight.to(x.dtype)).float() + own[span]
        for span, value in self.biases:
            wide[:, span] += value.float() - own[span]
            own[span] = value.float()
        for each in self.low_rank:
            span = each.span
            delta = (x.float() @ each.a.float().t()) @ each.b.float().t() * each.scale
            part = wide[:, span]
            if each.gain is not None:
                part = (part - own[span] + delta) * each.gain + own[span]
            else:
                part = part + delta
            wide[:, span] = part if each.bias is None else part + each.bias
        return wide


class SpecialTokens(NamedTuple):
    """The rows of one special adapter in a step, or among those whose logits are computed."""

    changes: Mapping[Any, LayerChange]
    """Key of a layer (`Site.key`) → what changes there."""
    rows: torch.Tensor
    """[N] int64"""


class ActiveAdapters(NamedTuple):
    """The adapters of the rows that are being computed."""

    chunks: AdapterChunks | None
    """Of plain adapters; None: there are none."""
    special: Sequence[SpecialTokens] = ()


class AdapterState:
    """What adapted layers read: shared by all of a model."""

    def __init__(self) -> None:
        self.active: ActiveAdapters | None = None
        """Set around a forward pass, and around logits. None: no row has an adapter."""


class Site:
    """A layer that adapters may change."""

    def __init__(self, key: str, state: AdapterState) -> None:
        """key: the module's name."""
        self.key = key
        self.state = state
        self.weights: SiteWeights | None = None
        """Of plain adapters; None: the layer is changed by special ones alone."""
        self.called = False
        """Whether a forward pass has called the layer: one whose weight is read by others cannot
        be changed."""

    def special(self, key: str | None = None) -> list[tuple[LayerChange, torch.Tensor]]:
        """Return what special adapters change here, and for which rows."""
        active, key = self.state.active, self.key if key is None else key
        if active is None:
            return []
        return [(each.changes[key], each.rows) for each in active.special if key in each.changes]

    def add(
        self,
        operations: Operations,
        out: torch.Tensor,
        x: torch.Tensor,
        norm: Norm | None = None,
    ) -> None:
        """Add what plain adapters add. norm: before their products"""
        active = self.state.active
        if active is not None and active.chunks is not None and self.weights is not None:
            operations.add_adapters(out, x, active.chunks, self.weights, norm=norm)
