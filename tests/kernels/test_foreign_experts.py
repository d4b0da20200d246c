"""A rank's experts alone: other ranks' slots cost nothing, and what was never written is not
read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from test_expert_kernels import (
    CLAMPED,
    DEVICE,
    DTYPES,
    KERNELS,
    REFERENCE,
    TOLERANCE,
    biases,
    dense,
    draw,
    packed,
    routing,
)

from jackfield.core.nn.layer_operations.experts import ExpertWeight
from jackfield.core.nn.quantized_weight import QuantizedWeight
from jackfield.core.nn.routing import Routing
from jackfield.core.parallel.expert_share import ExpertShare
from jackfield.plugins.operations.experts import few_slots

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 7, 3, 64, 32


@pytest.fixture(autouse=True)
def unwritten_memory_is_no_number() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class OfSize:
    """A group's numbers."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def own(weight: ExpertWeight, share: ExpertShare) -> Any:
    """Return a rank's rows of a weight."""
    if isinstance(weight, torch.Tensor):
        rows = len(weight) // share.num_experts
        return weight[share.own[0] * rows : (share.own[-1] + 1) * rows].clone()
    assert isinstance(weight, QuantizedWeight)
    rows = weight.out_features // share.num_experts
    return weight.rows(
        torch.arange(share.own[0] * rows, (share.own[-1] + 1) * rows, device=DEVICE)
    )._replace(scale_rows=1)


def sum_of_ranks(
    operations: Any, x: torch.Tensor, route: Routing, size: int, weights: dict[str, Any]
) -> torch.Tensor:
    """Return the sum of what ranks compute by their experts, in float32."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for rank in range(size):
        share: Any = ExpertShare.of(NUM_EXPERTS, OfSize(rank, size))  # type: ignore[arg-type]
        local = Routing(route.weights, route.experts - share.first, NUM_EXPERTS)
        held = {
            name: own(value, share) if isinstance(value, torch.Tensor | QuantizedWeight) else value
            for name, value in weights.items()
            if name != "activation"
        }
        more = {"activation": weights["activation"]} if "activation" in weights else {}
        part = operations.experts(
            x, local, held.pop("gate_up"), held.pop("down"), residual=None, **held,
            **more,
        )  # fmt: skip
        total += part.float()
    return total


def check(x: torch.Tensor, route: Routing, size: int, weights: dict[str, Any]) -> None:
    both = dict(weights)
    gate_up, down = both.pop("gate_up"), both.pop("down")
    whole = REFERENCE.experts(x, route, gate_up, down, residual=torch.zeros_like(x), **both).float()
    tolerance = 3 * TOLERANCE[x.dtype]
    for operations in (REFERENCE, KERNELS):
        total = sum_of_ranks(operations, x, route, size, weights)
        torch.testing.assert_close(total, whole, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 7])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_ranks_experts_add_up_to_all(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    """With an expert a rank, most slots of each are others'."""
    assert few_slots(num_tokens, TOP_K, NUM_EXPERTS) == (num_tokens == 1)
    weights = {
        "gate_up": dense(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype),
        "down": dense(NUM_EXPERTS, HIDDEN, INNER, dtype),
    }
    route = routing(num_tokens, TOP_K, NUM_EXPERTS)
    check(draw(num_tokens, HIDDEN, dtype=dtype), route, size, weights)


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_biases_and_activations_are_those_of_own_experts(num_tokens: int) -> None:
    dtype = torch.float32
    weights = {
        "gate_up": dense(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype),
        "down": dense(NUM_EXPERTS, HIDDEN, INNER, dtype),
        **biases(NUM_EXPERTS, HIDDEN, INNER, dtype),
        "activation": CLAMPED,
    }
    route = routing(num_tokens, TOP_K, NUM_EXPERTS)
    check(draw(num_tokens, HIDDEN, dtype=dtype), route, 2, weights)


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_experts_without_gates_add_up_to_all(num_tokens: int) -> None:
    weights = {
        "gate_up": dense(NUM_EXPERTS, INNER, HIDDEN, torch.float32),
        "down": dense(NUM_EXPERTS, HIDDEN, INNER, torch.float32),
        "activation": "relu2",
    }
    route = routing(num_tokens, TOP_K, NUM_EXPERTS)
    check(draw(num_tokens, HIDDEN), route, 2, weights)


@pytest.mark.parametrize("num_tokens", [1, 12])
@pytest.mark.parametrize("kind", ["fp8", "int8", "words4", "zeros4"])
def test_packed_experts_of_ranks_add_up_to_all(kind: str, num_tokens: int) -> None:
    dtype = torch.float32
    weights = {
        "gate_up": packed(kind, NUM_EXPERTS * 2 * INNER, HIDDEN, HIDDEN, dtype),
        "down": packed(kind, NUM_EXPERTS * HIDDEN, INNER, INNER, dtype),
    }
    route = routing(num_tokens, TOP_K, NUM_EXPERTS)
    check(draw(num_tokens, HIDDEN, dtype=dtype), route, 2, weights)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_rank_without_any_slot_adds_nothing(num_tokens: int, top_k: int) -> None:
    x, residual = draw(num_tokens, HIDDEN), draw(num_tokens, HIDDEN, seed=3)
    experts = torch.arange(top_k, dtype=torch.int32, device=DEVICE).expand(num_tokens, -1)
    for first in (-top_k, 5):
        route = Routing(torch.ones(num_tokens, top_k, device=DEVICE), experts + first, 9)
        out = KERNELS.experts(
            x, route, dense(5, 2 * INNER, HIDDEN, x.dtype), dense(5, HIDDEN, INNER, x.dtype),
            residual=residual.clone(),
        )  # fmt: skip
        assert torch.equal(out, residual)
