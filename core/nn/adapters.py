"""Layers that adapters change.

`adapt` gives a layer of the model a class that asks, at each call, whether the step at hand has
adapters. Without, it calls what the layer was: the same launches, and the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .activations import ACTIVATIONS
from .adapted_experts import AdaptedExpertOperations
from .adapter_sites import AdapterState, LayerChange, Site
from .embedding import Embedding
from .experts import ExpertLinear, Experts, Router
from .layer_operations.products import Norm, PositionRows, with_positions
from .linear import Linear
from .norm import RMSNorm
from .operations import Operations
from .quantized import QuantizedEmbedding, QuantizedLinear


class AdaptedLayer(nn.Module):
    """A layer with a site; comes before the layer's own class."""

    site: Site

    @property
    def _operations(self) -> Operations:
        spec = getattr(self, "spec", None)
        operations: Operations = self.operations if spec is None else spec.operations  # type: ignore[assignment]
        return operations

    def _change(self, out: torch.Tensor, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """Change the product, which has the layer's bias and nothing else: in place, or not. norm:
        before what plain adapters add, where there are no others."""
        self.site.add(self._operations, out, x, norm)
        for change, rows in self.site.special():
            changed = change.product(x[rows], out[rows], self.bias)  # type: ignore[arg-type]
            out[rows] = changed.to(out.dtype)
        return out


class AdaptedLinear(AdaptedLayer):
    """Of `Linear` and `QuantizedLinear`."""

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the layer's own."""
        own: Any = super()
        if self.site.state.active is None:
            return own.forward(x, norm=norm, residual=residual)
        self.site.called = True
        special = self.site.special()
        normed, before = x, None
        if norm is not None and len(x) == 1 and isinstance(norm, RMSNorm) and not special:
            # Operations apply a norm within products to a single row alone.
            before = norm.norm
        elif norm is not None:
            normed = norm(x)
        if len(x) > 1 and isinstance(self, Linear):
            x, norm = normed, None
        if _gated(self):
            product = self.ungated(x, norm=norm)  # type: ignore[operator]
            return self._operations.silu_mul(self._change(product, normed, before))
        if special:
            out = self._change(own.forward(x, norm=norm), normed)
            return out if residual is None else residual + out
        # Rows without an adapter get the bits that they get without adapters.
        out = own.forward(x, norm=norm, residual=residual)
        self.site.add(self._operations, out, normed, before)
        return out

    def add_scaled(self, residual: torch.Tensor, x: torch.Tensor, factor: float) -> torch.Tensor:
        """As the layer's own."""
        if self.site.state.active is None:
            own: Any = super()
            return own.add_scaled(residual, x, factor)
        return torch.add(residual, self(x), alpha=factor)

    def activated(
        self, x: torch.Tensor, activation: str, *, norm: nn.Module | None = None
    ) -> torch.Tensor:
        """As the layer's own."""
        if self.site.state.active is None:
            own: Any = super()
            return own.activated(x, activation, norm=norm)
        return ACTIVATIONS[activation](self(x, norm=norm))

    def logits(
        self, hidden: torch.Tensor, *, norm: nn.Module | None = None, factor: float = 1.0
    ) -> torch.Tensor:
        """As the layer's own, of a quantized head."""
        if self.site.state.active is None:
            own: Any = super()
            return own.logits(hidden, norm=norm, factor=factor)
        return _head_logits(self, hidden, norm, factor, own=None)


class AdaptedRouter(AdaptedLayer):
    """Of `Router`: an adapter of it changes which experts are chosen."""

    @property
    def weight_is_all(self) -> bool:
        """Whether no row has an adapter."""
        return self.site.state.active is None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer's own."""
        own: Any = super()
        out = own.forward(x)
        if self.site.state.active is None:
            return out
        self.site.called = True
        return self._change(out, x)


class AdaptedEmbedding(AdaptedLayer):
    """Of `Embedding` and `QuantizedEmbedding`, which may also be a head: the site's key with
    `HEAD` behind it is of what it computes as one."""

    def forward(
        self,
        token_ids: torch.Tensor,
        *,
        factor: float = 1.0,
        positions: PositionRows | None = None,
    ) -> torch.Tensor:
        """As the layer's own."""
        own: Any = super()
        if self.site.state.active is None:
            return own.forward(token_ids, factor=factor, positions=positions)
        self.site.called = True
        special = self.site.special()
        if not special:
            return own.forward(token_ids, factor=factor, positions=positions)
        out = own.forward(token_ids)
        for change, rows in special:
            ids = token_ids[rows]
            out[rows] = _looked_up(change, ids, out[rows].float()).to(out.dtype)
        return with_positions(out, factor, positions)

    def logits(
        self, hidden: torch.Tensor, *, norm: nn.Module | None = None, factor: float = 1.0
    ) -> torch.Tensor:
        """As the layer's own."""
        if self.site.state.active is None:
            own: Any = super()
            return own.logits(hidden, norm=norm, factor=factor)
        shard = getattr(self, "own", None)
        gathers = getattr(self, "gathers", True)
        return _head_logits(self, hidden, norm, factor, own=None if gathers else shard)


HEAD = " (head)"
"""Behind a site's key: what the layer computes as a head."""


def _head_logits(
    layer: Any,
    hidden: torch.Tensor,
    norm: nn.Module | None,
    factor: float,
    *,
    own: slice | None,
) -> torch.Tensor:
    """Compute logits; own: the tokens that this rank computes alone, of a head in parts."""
    special = layer.site.special(layer.site.key + HEAD)
    base: Any = super(
        AdaptedLinear if isinstance(layer, AdaptedLinear) else AdaptedEmbedding, layer
    )
    if not special:
        out: torch.Tensor = base.logits(hidden, norm=norm, factor=factor)
        return out
    normed = hidden if norm is None else norm(hidden)
    out = base.logits(hidden, norm=norm)
    bias = getattr(layer, "bias", None)
    for change, rows in special:
        x = normed[rows]
        size = _vocab_size(change, out) if own is None else own.stop - own.start
        mine_alone = change if own is None else _of_own(change, own)
        wide = mine_alone.product(x, out[rows][:, :size], None)
        assert bias is None or change.weight is None, "refused when it was read"
        if change.token_ids is not None and change.token_rows is not None:
            logits = F.linear(x, change.token_rows.to(x.dtype)).float()
            ids = change.token_ids
            if own is not None:
                mine = (ids >= own.start) & (ids < own.stop)
                ids, logits = ids[mine] - own.start, logits[:, mine]
            wide[:, ids] = logits
        out[rows, : wide.shape[1]] = wide.to(out.dtype)
    return out if factor == 1.0 else out.mul_(factor)


def _vocab_size(change: LayerChange, out: torch.Tensor) -> int:
    """Return the tokens that a change is of: logits may have padding behind them."""
    if change.weight is not None:
        return int(change.weight.shape[0])
    return max((int(each.span.stop) for each in change.low_rank), default=out.shape[1])


def _of_own(change: LayerChange, own: slice) -> LayerChange:
    """Return the part of a head's change that is of this rank's tokens."""
    weight = None if change.weight is None else change.weight[own]
    size = own.stop - own.start
    low_rank = tuple(
        each._replace(
            span=slice(0, size), b=each.b[own],
            bias=None if each.bias is None else each.bias[own],
            gain=None if each.gain is None else each.gain[own],
        )
        for each in change.low_rank
    )  # fmt: skip
    return LayerChange(low_rank, weight)


def _looked_up(change: LayerChange, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the changed rows of an embedding: ids [N] → [N, hidden_size] float32."""
    if change.weight is not None:
        rows = F.embedding(ids, change.weight).float()
    for each in change.low_rank:
        rows = rows + each.a.float().t()[ids] @ each.b.float().t() * each.scale
    if change.token_ids is not None and change.token_rows is not None:
        at = torch.searchsorted(change.token_ids, ids).clamp(max=len(change.token_ids) - 1)
        matches = change.token_ids[at] == ids
        rows = torch.where(matches[:, None], change.token_rows[at].float(), rows)
    return rows


def _gated(layer: nn.Module) -> bool:
    spec = getattr(layer, "spec", None)
    return bool(getattr(layer, "gated", False) if spec is None else spec.gated)


@cache
def _adapted_class(own: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class of an adapted layer whose class is `own`; None: such layers are not
    changed."""
    kinds: tuple[tuple[Any, type[AdaptedLayer]], ...] = (
        (ExpertLinear, AdaptedLayer),
        (Linear | QuantizedLinear, AdaptedLinear),
        (Embedding | QuantizedEmbedding, AdaptedEmbedding),
        (Router, AdaptedRouter),
    )
    kind = next((adapted for base, adapted in kinds if issubclass(own, base)), None)
    if kind is None or kind is AdaptedLayer:
        return None
    return type(f"Adapted{own.__name__}", (kind, own), {"__module__": own.__module__})


def adapt(model: nn.Module, state: AdapterState) -> dict[str, Site]:
    """Let adapters change the layers of a model. Return the sites by the names of their modules; of
    experts, the module of all of a layer's."""
    sites: dict[str, Site] = {}
    modules = dict(model.named_modules())
    quantized_embeddings = {
        name for name, module in modules.items() if isinstance(module, QuantizedEmbedding)
    }
    for name, module in modules.items():
        own: Any = type(module)
        adapted = _adapted_class(own)
        inside = name.rpartition(".")[0]
        if adapted is None or inside in quantized_embeddings:
            continue  # The layer of a quantized embedding is changed through the embedding.
        site = sites[name] = Site(name, state)
        module.__class__ = adapted
        module.site = site  # type: ignore[assignment]
    for name, module in modules.items():
        if isinstance(module, Experts):
            site = sites[name] = Site(name, state)
            owner = module if hasattr(module, "operations") else modules[name.rpartition(".")[0]]
            owner.operations = AdaptedExpertOperations(owner.operations, site)  # type: ignore[assignment, arg-type]
    return sites
