"""Checks of mixtures of experts, for `OperationsKit`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ...core.nn.activations import ClampedSwiGLU, LimitedSwiGLU
from ...core.nn.layer_operations.experts import DenseRows
from ...core.nn.quantized_weight import QuantizedWeight, pack_e2m1, round_to_words
from ...core.nn.routing import Routing, RoutingRule
from .operation_arguments import REFERENCE, SIZE, TOKENS, wide

BIAS = torch.zeros(0)
"""Stands for a bias of random numbers."""
RULES: tuple[dict[str, Any], ...] = (
    {}, {"renormalize": True}, {"renormalize": True, "factor": 2.5},
    {"scoring": "sigmoid"}, {"scoring": "sigmoid", "bias": BIAS, "renormalize": True},
    {"scoring": "sigmoid", "bias": BIAS, "groups": 4, "top_groups": 2, "factor": 0.5},
    {"groups": 2},
)  # fmt: skip
"""Routing rules, besides `top_k`."""


class ExpertChecks:
    """Part of `OperationsKit`."""

    device: Any
    draw: Any
    make: Any
    norm: Any
    near: Any
    packed: Any

    @pytest.mark.parametrize("options", RULES, ids=lambda options: "+".join(options) or "plain")
    @pytest.mark.parametrize("shape", [(1, 8, 2), (9, 60, 4), (6, 5, 5), (40, 128, 8)])
    def test_route(
        self, shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """Of equal logits, the lower expert number goes first."""
        tokens, experts, top_k = shape
        # Sigmoids of large logits are almost equal.
        logits = self.draw(tokens, experts, dtype=dtype) * (1 if "scoring" in options else 4)
        logits[0, 1::2] = logits[0].max()
        rule = RoutingRule(top_k)._replace(**options)
        if rule.bias is not None:
            bias = self.draw(experts, dtype=torch.float32, seed=3)
            bias[1::2] = bias[1]
            rule = rule._replace(bias=bias)
        if experts % rule.groups or top_k > experts // rule.groups * rule.top_groups:
            pytest.skip("these experts cannot be chosen by groups")
        operations = self.make(dtype)
        if lacking := rule.features - operations.features:
            pytest.skip(f"{operations.name} does not claim {', '.join(sorted(lacking))}")
        want = REFERENCE.route(logits.float(), rule)
        got = operations.route(logits.clone(), rule)
        assert got.experts.dtype == torch.int32 and got.weights.dtype == torch.float32
        assert torch.equal(got.experts, want.experts)
        self.near(got.weights, want.weights, torch.float32)

    @pytest.mark.parametrize("kind", ["plain", "bias", "wide"])
    @pytest.mark.parametrize("tokens", [1, 3, 9])
    def test_normed_linear(self, tokens: int, kind: str, dtype: torch.dtype) -> None:
        """A router's logits, which may be wide, and what it and the experts read."""
        hidden = self.draw(tokens, SIZE, dtype=dtype)
        norm = self.norm(SIZE, dtype)
        wide_type = torch.float32 if kind == "wide" else dtype
        weight = self.draw(12, SIZE, dtype=wide_type, seed=4, scale=SIZE**-0.5)
        bias = self.draw(12, dtype=dtype, seed=5) if kind == "bias" else None
        x = REFERENCE.rms_norm(hidden, norm)
        want = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        normed, out = self.make(dtype).normed_linear(hidden.clone(), norm, weight, bias)
        assert normed.dtype == dtype and out.dtype == wide_type
        self.near(normed, x, dtype)
        self.near(out, want, dtype, times=3)

    @pytest.mark.parametrize("kind", ["plain", "bias", "4 bits", "rows"])
    def test_products_of_experts(self, kind: str, dtype: torch.dtype) -> None:
        """An expert with many rows, one with none, and rows whose expert is on another rank."""
        number, size = 5, 64
        experts = torch.tensor([0, 3, 3, -1, 1, 3, 5, 3, 0, 7, 4, 3], dtype=torch.int32)
        experts = experts.to(self.device)
        x = self.draw(len(experts), SIZE, dtype=dtype)
        weight: Any = self.draw(number * size, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        if kind == "4 bits":
            weight = self.packed(kind, number * size, dtype)
        exact = wide(weight)
        if kind == "rows":
            table = weight
            weight = DenseRows(len(table), lambda rows: table[rows])
        bias = self.draw(number * size, dtype=dtype, seed=11) if kind == "bias" else None
        want = REFERENCE.expert_products(
            x.float(), experts, exact, number, None if bias is None else bias.float()
        )
        got = self.make(dtype).expert_products(x, experts, weight, number, bias)
        assert got.dtype == dtype
        assert not got[[3, 6, 9]].any(), "other ranks' experts have no products here"
        self.near(got, want, dtype, times=3)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize(
        "kind",
        [
            "plain",
            "biases",
            "gelu",
            "limit",
            "no gates",
            "4 bits",
            "fp8",
            "4-bit floats",
            "rows",
            "foreign",
        ],
    )
    def test_experts(self, kind: str, tokens: int, dtype: torch.dtype) -> None:
        """Check some experts with many tokens, some with none, and ("foreign") with other ranks'
        experts among the chosen."""
        number, inner, top_k = 6, 64, 3
        x = self.draw(tokens, SIZE, dtype=dtype)
        logits = self.draw(tokens, number, dtype=torch.float32, seed=2)
        logits[:, 4] = -100.0
        routing = REFERENCE.route(logits, RoutingRule(top_k, renormalize=True))
        if kind == "foreign":
            # Of nine experts, the second to the seventh are here.
            logits = self.draw(tokens, number + 3, dtype=torch.float32, seed=2)
            routing = REFERENCE.route(logits, RoutingRule(top_k, renormalize=True))
            routing = routing._replace(experts=routing.experts - 1, num_experts=number + 3)
        more: dict[str, Any] = {}
        if kind == "4-bit floats":
            gate_up: Any = self.packed(kind, number * 2 * inner, dtype)
            # A row is one run, which is shorter than others.
            draw = torch.Generator().manual_seed(5)
            words = pack_e2m1(torch.randint(0, 16, (number * SIZE, inner), generator=draw), 32)
            scale = (torch.rand(inner // 32, number * SIZE, generator=draw) + 0.5) / 3 / inner**0.5
            down: Any = QuantizedWeight(
                words.to(self.device), scale.to(self.device, dtype), 32, bits=4, e2m1_run=32
            )
        elif kind in ("4 bits", "fp8"):
            gate_up = self.packed(kind, number * 2 * inner, dtype)
            words, scale = round_to_words(
                self.draw(number * SIZE, inner, dtype=dtype, seed=5, scale=inner**-0.5), 4, 32
            )
            down = QuantizedWeight(words, scale, 32, bits=4)
        else:
            gate_up = self.draw(number * 2 * inner, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
            down = self.draw(number * SIZE, inner, dtype=dtype, seed=5, scale=inner**-0.5)
        exact = [wide(gate_up), wide(down)]
        if kind == "rows":
            table, lower = gate_up, down
            gate_up = DenseRows(len(table), lambda rows: table[rows])
            down = DenseRows(len(lower), lambda rows: lower[rows])
        if kind == "biases":
            more = {
                "gate_up_bias": self.draw(number * 2 * inner, dtype=dtype, seed=11),
                "down_bias": self.draw(number * SIZE, dtype=dtype, seed=12),
                "activation": ClampedSwiGLU(1.7, 0.8),
            }
        if kind == "gelu":
            if "experts.gelu" not in self.make(dtype).features:
                pytest.skip("these operations have no experts with gelu")
            more = {"activation": "gelu"}
        if kind == "limit":
            if "experts.limit" not in self.make(dtype).features:
                pytest.skip("these operations have no experts with limits")
            more = {"activation": LimitedSwiGLU(0.4)}
        if kind == "no gates":
            if "experts.relu2" not in self.make(dtype).features:
                pytest.skip("these operations have no experts without gates")
            gate_up, more = gate_up[: number * inner], {"activation": "relu2"}
            exact[0] = wide(gate_up)
        residual = self.draw(tokens, SIZE, dtype=dtype, seed=8)
        want = REFERENCE.experts(
            x.float(), routing, *exact, residual=residual.float(),
            **{key: wide(value) for key, value in more.items()},
        )  # fmt: skip
        operations = self.make(dtype)
        if kind == "foreign" and "experts.foreign" not in operations.features:
            pytest.skip(f"{operations.name} does not claim experts.foreign")
        kept = x.clone()
        chosen = Routing(routing.weights.clone(), routing.experts.clone(), routing.num_experts)
        got = operations.experts(x, chosen, gate_up, down, residual=residual.clone(), **more)
        assert got.dtype == dtype
        assert torch.equal(x, kept), "experts overwrites what it was given"
        self.near(got, want, dtype, times=3)
        if "experts.no_residual" in operations.features:
            alone = operations.experts(x, chosen, gate_up, down, residual=None, **more)
            self.near(alone, want - residual.float(), dtype, times=3)
