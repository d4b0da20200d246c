"""Checks of operations and attention backends that claim `batch_invariant`, for their kits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ...core.nn.operations import Norm
from ...core.nn.quantized_weight import QuantizedWeight
from ...core.nn.routing import RoutingRule
from .attention_cases import make_spec, write
from .operation_arguments import SIZE
from .paged import make_batch, make_layout

STEPS: Sequence[Sequence[tuple[int, int, int]]] = (
    [(0, 90, 17), (1, 40, 1)], [(1, 40, 5)], [(0, 75, 1), (1, 40, 40)], [(0, 33, 32)],
    [(0, 20, 1)], [(1, 1, 1), (0, 90, 1)],
)  # fmt: skip
"""Steps of two rows: (row, tokens so far, queries), which are its last tokens."""
BATCHES = ([0], [3, 4], list(range(32, 8, -1)), [7] * 40)
"""Rows of 33, in other places and beside others."""


class InvariantAttention:
    """Part of `AttentionBackendKit`."""

    device: Any
    make: Any
    backend_class: Any

    @pytest.mark.parametrize(
        "features",
        [
            {}, {"sliding_window": 24}, {"attention_chunk_size": 30, "chunk_lookback": 1},
            {"soft_cap": 3.0},
        ],
        ids=lambda features: "+".join(features) or "plain",
    )  # fmt: skip
    def test_a_query_has_the_same_bits_in_any_step(
        self, features: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """Of a prompt in one step: in chunks, as drafts and decoded, alone and beside others."""
        if not self.backend_class.batch_invariant:
            pytest.skip("it does not claim batch_invariant")
        spec = make_spec((4, 2, 64, 16), **features)
        backend = self.make(spec, dtype)
        batch = make_batch([(90, 90), (40, 40)], spec, 16, self.device, dtype)
        query, key, value = (batch.joined(part) for part in ("query", "key", "value"))
        write(batch.cache, batch.layout, key, value)

        def attend(step: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the step's results, and which tokens of the batch they are of."""
            firsts = (0, 90)
            tokens = torch.cat(
                [torch.arange(firsts[r] + n - count, firsts[r] + n) for r, n, count in step]
            ).to(self.device)
            layout = make_layout(
                [(length, count) for _, length, count in step],
                batch.layout.block_table[[row for row, _, _ in step]],
                batch.layout.slot_mapping[tokens], self.device,
            )  # fmt: skip
            metadata = backend.build_metadata(layout)
            parts = (part[tokens] for part in (query, key, value))
            return backend.forward(spec, *parts, batch.cache, metadata), tokens

        whole, _ = attend([(0, 90, 90), (1, 40, 40)])
        for step in STEPS:
            got, tokens = attend(step)
            assert torch.equal(got, whole[tokens]), f"{step}"


class InvariantOperations:
    """Part of `OperationsKit`."""

    device: Any
    make: Any
    draw: Any
    packed: Any

    @pytest.mark.parametrize(
        "name",
        [
            "rms_norm", "layer_norm", "silu_mul", "sigmoid_gate", "pointwise", "linear",
            "activated_linear", "gated_linear", "4 bits", "fp8", "quantized inputs", "route",
            "experts", "expert_products",
        ],
    )  # fmt: skip
    def test_a_row_has_the_same_bits_in_any_batch(self, name: str, dtype: torch.dtype) -> None:
        operations = self.make(dtype)
        if not operations.batch_invariant:
            pytest.skip("it does not claim batch_invariant")
        x = self.draw(33, SIZE, dtype=dtype)
        whole = self._computed(operations, name, x)
        for rows in BATCHES:
            for got, want in zip(self._computed(operations, name, x[rows]), whole, strict=True):
                assert torch.equal(got, want[rows]), f"{len(rows)} rows"

    def _computed(self, operations: Any, name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results of an operation with some weights, a row per row of x."""
        dtype, rows = x.dtype, len(x)
        weight = self.draw(100, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        norm, bias = Norm(self.draw(SIZE, dtype=dtype, seed=3) + 1.0, 0.3), weight[:, 0].clone()
        if name == "route":
            return tuple(operations.route(x[:, :60], RoutingRule(4, "sigmoid"))[:2])
        if name in ("experts", "expert_products"):
            number, inner = 6, 64
            up = self.draw(number * 2 * inner, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
            down = self.draw(number * SIZE, inner, dtype=dtype, seed=5, scale=inner**-0.5)
            routing = operations.route(x[:, :number], RoutingRule(3, renormalize=True))
            if name == "experts":
                return (operations.experts(x, routing, up, down, residual=x.clone()),)
            experts = routing.experts[:, 0].contiguous()
            return (operations.expert_products(x, experts, up, number),)
        if isinstance(packed := self._weight(name, dtype), QuantizedWeight):
            return (operations.quantized_linear(x, packed, norm=norm),)
        arguments: dict[str, Any] = {
            "rms_norm": (norm,), "layer_norm": (norm.weight, None, 0.3), "silu_mul": (),
            "sigmoid_gate": (x, weight[:1]), "linear": (weight, bias),
            "activated_linear": (weight, bias), "gated_linear": (weight,),
        }  # fmt: skip
        if name == "pointwise":
            return (operations.pointwise(torch.sigmoid, x[:, :41]),)
        more: dict[str, Any] = {"norm": norm} if "linear" in name else {}
        if name == "linear":
            more["residual"] = x[:, :100].clone()
        if name == "activated_linear":
            more["activation"] = "gelu"
        out = getattr(operations, name)(x, *arguments[name], **more)
        assert len(out) == rows
        return (out,)

    def _weight(self, name: str, dtype: torch.dtype) -> QuantizedWeight | None:
        kinds = ("4 bits", "fp8", "quantized inputs")
        return self.packed(name, 96, dtype) if name in kinds else None
