"""Mixtures of experts that adapters change."""

from __future__ import annotations

from typing import Any

import torch

from .activations import ExpertActivation
from .adapter_sites import LayerChange, Site
from .layer_operations.experts import ExpertWeight, num_rows
from .operations import Operations
from .routing import Routing
from .step_operations.adapters import CHUNK_TOKENS, AdapterChunks, AdapterTables, chunk_count


class AdaptedExpertOperations:
    """Operations of a module that computes experts: rows of adapters that change experts are
    computed again, from products of single experts, for each adapter by itself."""

    def __init__(self, operations: Operations, site: Site) -> None:
        self._own = operations
        self._site = site

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        *,
        residual: torch.Tensor | None,
        **more: Any,
    ) -> torch.Tensor:
        """As `Operations.experts`."""
        if self._site.state.active is not None:
            self._site.called = True
        special = self._site.special()
        before = [0.0 if residual is None else residual[rows].float() for _, rows in special]
        out = self._own.experts(x, routing, gate_up, down, residual=residual, **more)
        for (change, rows), added in zip(special, before, strict=True):
            own = routing._replace(experts=routing.experts[rows], weights=routing.weights[rows])
            changed = self._changed(x[rows], own, gate_up, down, change, **more)
            out[rows] = (added + changed).to(out.dtype)
        return out

    def _changed(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        change: LayerChange,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: ExpertActivation | None = None,
    ) -> torch.Tensor:
        """Return the sum of experts with what an adapter changes, [N, hidden_size] float32."""
        num_experts, (num_tokens, top_k) = num_rows(down) // x.shape[1], routing.experts.shape
        experts = routing.experts.reshape(-1)
        foreign = routing.num_experts is not None
        places = self._by_expert(experts, num_experts)

        def products(
            x: torch.Tensor, weight: ExpertWeight, bias: torch.Tensor | None, which: str
        ) -> torch.Tensor:
            out = self._own.expert_products(x, experts, weight, num_experts, bias)
            if (added := change.experts.get(which)) is not None:
                self._own.add_adapters(out, x, places, added)
            return out

        inner = products(x.repeat_interleave(top_k, dim=0), gate_up, gate_up_bias, "first")
        out = products(self._own.activated(inner, activation), down, down_bias, "down")
        weights = routing.weights.reshape(-1, 1)
        if foreign:
            elsewhere = (experts < 0) | (experts >= num_experts)
            weights = weights.masked_fill(elsewhere[:, None], 0.0)
        return (out.float() * weights).view(num_tokens, top_k, -1).sum(dim=1)

    def _by_expert(self, experts: torch.Tensor, num_experts: int) -> AdapterChunks:
        """Return rows in chunks of one expert each: an expert is the place of its matrices.
        experts: [N] int32"""
        count, device = len(experts), experts.device
        slots = torch.where((experts < 0) | (experts >= num_experts), num_experts, experts)
        places = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
        places[num_experts] = -1
        tables = AdapterTables(
            places, torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        )
        return self._own.adapter_chunks(
            slots.to(torch.int32),
            torch.arange(count + 1, dtype=torch.int32, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            tables,
            chunk_count(count, num_experts),
            CHUNK_TOKENS,
        )
