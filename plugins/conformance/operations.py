"""`OperationsKit`: each operation against `core.nn.operations.Operations`, the torch reference.

    class TestMine(OperationsKit):
        name = "mine"                                 # as registered
        dtypes = ("float32", "bfloat16")              # what it must serve here

On a GPU where there is one, else on the CPU. The reference computes in float32, from the same
numbers: the differences are the rounding of the plugin's own sums and results. Arguments that an
operation may not overwrite must stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ...core.nn.activations import ACTIVATIONS
from ...core.nn.operations import (
    CenteredNorm,
    ClampedSwiGLU,
    DenseRows,
    HeadLayout,
    Norm,
    Operations,
)
from ...core.nn.packed import (
    PackedWeight,
    pack_words,
    round_to_fp8,
    round_to_int8,
    round_to_words,
)
from ...core.nn.ragged import RaggedRows
from ...core.nn.routing import Routing, RoutingRule
from .batch_operations import BatchChecks
from .kit import Kit
from .quantized_caches import QuantizedCacheChecks
from .states import StateChecks

REFERENCE = Operations()
BIAS = torch.zeros(0)
"""Stands for a bias of random numbers."""
RULES: tuple[dict[str, Any], ...] = (
    {}, {"renormalize": True}, {"renormalize": True, "factor": 2.5},
    {"scoring": "sigmoid"}, {"scoring": "sigmoid", "bias": BIAS, "renormalize": True},
    {"scoring": "sigmoid", "bias": BIAS, "groups": 4, "top_groups": 2, "factor": 0.5},
    {"groups": 2},
)  # fmt: skip
"""Routing rules, besides `top_k`."""
TOKENS = (1, 2, 5, 33)
"""One and few tokens often have separate implementations."""
SIZE, OUTPUTS = 256, 96
GREATEST = 3.0
"""No result of a case is far beyond this, so tolerances are absolute."""


def wide(value: Any) -> Any:
    """Convert to float32; objects without numbers are returned unchanged."""
    if isinstance(value, PackedWeight):
        return value._replace(scale=value.scale.float())
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() and value.dtype.itemsize > 1 else value
    if isinstance(value, Norm):
        return Norm(value.weight.float(), value.eps)
    if isinstance(value, CenteredNorm):
        return CenteredNorm(wide(value.weight), wide(value.bias), value.eps)
    return value


def copied(value: Any) -> Any:
    """Copy the value, tensors included."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Norm):
        return Norm(value.weight.clone(), value.eps)
    if isinstance(value, CenteredNorm):
        return CenteredNorm(copied(value.weight), copied(value.bias), value.eps)
    if isinstance(value, PackedWeight):
        parts: dict[str, Any] = {name: part.clone() for name, part in value.tensors().items()}
        return value._replace(**parts)
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedWeight):
        return list(value.tensors().values())
    return [value.weight] if isinstance(value, Norm) else []


class OperationsKit(BatchChecks, QuantizedCacheChecks, StateChecks, Kit):
    """Subclass it in your tests, and set the class variables."""

    kind = "operations"
    dtypes: ClassVar[Sequence[str]] = ("float32", "float16", "bfloat16")
    """Dtypes to check; one that the class refuses is skipped, with the reason."""
    promised: ClassVar[frozenset[str]] = frozenset()
    """Dtypes that it must not refuse on this machine."""
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 1e-4,
        torch.float16: 1e-2,
        torch.bfloat16: 6e-2,
    }
    """Absolute and relative tolerance, for results of size about 1."""
    quantized_inputs: ClassVar[float] = 0.06
    """Allowed error of a product if a weight lets its inputs be rounded to 8 bits."""

    # -------------------------------------------------------------- what tests are made of

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize each test over `dtypes`."""
        if "dtype" in metafunc.fixturenames:
            kinds = [getattr(torch, name) for name in self.dtypes]
            metafunc.parametrize("dtype", kinds, ids=self.dtypes)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make(self, dtype: torch.dtype) -> Operations:
        """Create an instance; the test is skipped if it is refused."""
        kind = self.registered()
        reason = kind.supports(self.device, dtype)
        if reason is not None:
            name = str(dtype).removeprefix("torch.")
            assert name not in self.promised, f"{self.name} promises {name}, and says: {reason}"
            pytest.skip(f"{self.name}: {reason}")
        made: Operations = kind()
        return made

    def draw(self, *shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Any:
        made = torch.Generator().manual_seed(seed + 17 * len(shape))
        return (torch.randn(*shape, generator=made) * scale).to(self.device, dtype)

    def norm(self, size: int, dtype: torch.dtype, seed: int = 3) -> Norm:
        """Create a norm with an eps that affects results."""
        return Norm(self.draw(size, dtype=dtype, seed=seed, scale=0.2) + 1.0, 0.3)

    def near(
        self, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, times: float = 1.0
    ) -> None:
        bound = self.tolerance[dtype] * times
        torch.testing.assert_close(got.float(), want.float(), atol=bound, rtol=bound)

    def compare(
        self,
        name: str,
        dtype: torch.dtype,
        *args: Any,
        times: float = 1.0,
        overwrites: Sequence[str] = ("residual",),
        **more: Any,
    ) -> None:
        """Check an operation's single result, in x's dtype; its other arguments must be
        unchanged."""
        operations = self.make(dtype)
        given = [copied(value) for value in args]
        named = {key: copied(value) for key, value in more.items()}
        got = getattr(operations, name)(*given, **named)
        exact = {key: wide(value) for key, value in more.items()}
        want = getattr(REFERENCE, name)(*map(wide, args), **copied_all(exact))
        assert got.dtype == dtype, f"{name} gives {got.dtype} for {dtype}"
        self.near(got, want, dtype, times)
        kept = [*zip(args, given, strict=True)]
        kept += [(more[key], named[key]) for key in more if key not in overwrites]
        for before, after in kept:
            for was, now in zip(tensors(before), tensors(after), strict=True):
                assert torch.equal(was.view(torch.uint8), now.view(torch.uint8)), (
                    f"{name} overwrites what it was given"
                )

    # -------------------------------------------------------------- norms and activations

    def test_rms_norm(self, dtype: torch.dtype) -> None:
        """Norm rows, heads in a projection, and with a weight in float32."""
        for shape in ((1, SIZE), (5, 80), (7, 1000), (2, 3, 64)):
            norm = self.norm(shape[-1], dtype)
            self.compare("rms_norm", dtype, self.draw(*shape, dtype=dtype), norm)
        self.compare(
            "rms_norm", dtype, self.draw(4, SIZE, dtype=dtype), self.norm(SIZE, torch.float32)
        )
        small = self.draw(3, SIZE, dtype=dtype, scale=1e-3)
        self.compare("rms_norm", dtype, small, self.norm(SIZE, dtype)._replace(eps=1e-6))

    def test_rms_norm_of_part_of_a_tensor(self, dtype: torch.dtype) -> None:
        """Norm rows that are not contiguous."""
        operations = self.make(dtype)
        whole = self.draw(6, 3 * SIZE, dtype=dtype)
        part, norm = whole[:, SIZE : 2 * SIZE], self.norm(SIZE, dtype)
        got = operations.rms_norm(part, norm)
        self.near(got, REFERENCE.rms_norm(part.float(), wide(norm)), dtype)

    def test_large_numbers_before_a_norm_stay_finite(self, dtype: torch.dtype) -> None:
        """The squares exceed float16."""
        x = self.draw(3, SIZE, dtype=dtype, scale=3000.0)
        self.compare("rms_norm", dtype, x, self.norm(SIZE, dtype))

    def test_add_rms_norm(self, dtype: torch.dtype) -> None:
        for tokens in TOKENS:
            x, residual = (self.draw(tokens, SIZE, dtype=dtype, seed=n) for n in (1, 2))
            operations, norm = self.make(dtype), self.norm(SIZE, dtype)
            want = REFERENCE.add_rms_norm(x.float(), wide(norm), residual.float())
            got = operations.add_rms_norm(x.clone(), norm, residual.clone())
            assert got.dtype == dtype
            self.near(got, want, dtype)

    def test_layer_norm(self, dtype: torch.dtype) -> None:
        weight, bias = (self.draw(SIZE, dtype=dtype, seed=n) for n in (4, 5))
        for tokens in TOKENS:
            x = self.draw(tokens, SIZE, dtype=dtype) + 2.0
            for one in (bias, None):
                self.compare("layer_norm", dtype, x, weight, one, 0.3, times=2)

    @pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
    def test_gated_activations(self, name: str, dtype: torch.dtype) -> None:
        for tokens, size in ((1, 96), (5, 1000), (33, 64)):
            x = self.draw(tokens, 2 * size, dtype=dtype, scale=2.0)
            self.compare(name, dtype, x, times=2)

    def test_sigmoid_gates(self, dtype: torch.dtype) -> None:
        """A number each, part of a wider tensor, or a logit per row."""
        x, wide = self.draw(3, 40, dtype=dtype), self.draw(3, 100, dtype=dtype, seed=1)
        self.compare("sigmoid_gate", dtype, x, wide[:, 30:70])
        self.compare("sigmoid_gate", dtype, x, wide, self.draw(1, 100, dtype=dtype, seed=2))

    def test_xielu(self, dtype: torch.dtype) -> None:
        """Near 0 and far from it."""
        weights = torch.tensor([0.8, 1.3, 0.5, -1e-6], device=self.device)
        for scale in (2.0, 1e-3):
            x = self.draw(5, 999, dtype=dtype, scale=scale).clamp(-3, 1)
            self.compare("xielu", dtype, x, weights, times=2)

    # -------------------------------------------------------------- products

    def product_cases(
        self, dtype: torch.dtype, rows: int, name: str = "packed_linear"
    ) -> list[dict[str, Any]]:
        """Return the arguments of a method besides x and the weight."""
        bias = self.draw(rows, dtype=dtype, seed=7)
        cases: list[dict[str, Any]] = [{}, {"bias": bias}, {"norm": self.norm(SIZE, dtype)}]
        if f"{name}.layer_norm" in self.make(dtype).features:
            weight, offset = self.norm(SIZE, dtype).weight, self.draw(SIZE, dtype=dtype, seed=5)
            cases.append({"norm": CenteredNorm(weight, offset, 0.3), "bias": bias})
        return cases

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_linear(self, tokens: int, dtype: torch.dtype) -> None:
        """Multiply with a bias, a norm before, a residual after, and all of them."""
        weight = self.draw(OUTPUTS, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        x = self.draw(tokens, SIZE, dtype=dtype)
        residual = self.draw(tokens, OUTPUTS, dtype=dtype, seed=8)
        cases = self.product_cases(dtype, OUTPUTS, "linear")
        every = {**cases[1], **cases[2], "residual": residual}
        cases += [{"residual": residual}, every]
        if "linear.factor" in self.make(dtype).features:
            cases.append({**every, "factor": 0.3})
        for case in cases:
            self.compare("linear", dtype, x, weight, times=2, **case)

    @pytest.mark.parametrize("tokens", TOKENS[:2])
    def test_activated_linear(self, tokens: int, dtype: torch.dtype) -> None:
        weight = self.draw(OUTPUTS, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        x = self.draw(tokens, SIZE, dtype=dtype)
        cases = self.product_cases(dtype, OUTPUTS, "activated_linear")
        for number, activation in enumerate(ACTIVATIONS):
            case = cases[number % len(cases)]
            self.compare(
                "activated_linear", dtype, x, weight, times=2, activation=activation, **case
            )

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_gated_linear(self, tokens: int, dtype: torch.dtype) -> None:
        weight = self.draw(2 * OUTPUTS, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        x = self.draw(tokens, SIZE, dtype=dtype)
        cases = self.product_cases(dtype, 2 * OUTPUTS, "gated_linear")
        for case in (*cases, {**cases[1], **cases[2]}):
            self.compare("gated_linear", dtype, x, weight, times=2, **case)

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_rows_do_not_depend_on_those_beside_them(self, tokens: int, dtype: torch.dtype) -> None:
        """A token's result does not depend on the other tokens of its step."""
        operations = self.make(dtype)
        weight = self.draw(OUTPUTS, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        x = self.draw(tokens, SIZE, dtype=dtype)
        other = x.clone()
        other[1:] = float("nan")
        norm = self.norm(SIZE, dtype)
        for name in ("linear", "gated_linear"):
            got, want = (getattr(operations, name)(one, weight, norm=norm) for one in (other, x))
            assert torch.equal(got[0], want[0])

    def packed(self, kind: str, rows: int, dtype: torch.dtype) -> PackedWeight:
        """Create a weight of `rows` rows in one of the layouts."""
        dense = self.draw(rows, SIZE, dtype=torch.float32, seed=6, scale=SIZE**-0.5)
        draw = torch.Generator().manual_seed(9)
        if kind in ("fp8", "int8", "quantized inputs"):
            values, scale = (round_to_int8 if kind == "int8" else round_to_fp8)(dense)
            inputs = "quantized" if kind == "quantized inputs" else "wide"
            return PackedWeight(values, scale[None], SIZE, inputs=inputs)  # type: ignore[arg-type]
        if kind == "fp8 blocks":
            values, _ = round_to_fp8(dense * SIZE**0.5 * 100, dim=None)
            scale = torch.rand(SIZE // 128, -(-rows // 32), generator=draw) + 0.5
            scale = (scale * SIZE**-0.5 / 300).to(self.device)
            return PackedWeight(values, scale, 128, scale_rows=32)
        bits = 8 if kind == "8 bits" else 4
        group = {"narrow groups": 8, "whole rows": SIZE}.get(kind, 32)
        if kind == "zeros":
            numbers = torch.randint(0, 1 << bits, (rows, SIZE), generator=draw)
            zero = torch.randint(0, 1 << bits, (SIZE // group, rows), generator=draw)
            scale = (torch.rand(SIZE // group, rows, generator=draw) + 0.5) / 6 / SIZE**0.5
            return PackedWeight(
                pack_words(numbers, bits).to(self.device), scale.to(self.device, dtype), group,
                zero.to(torch.uint8).to(self.device), bits=bits,
            )  # fmt: skip
        words, scale = round_to_words(dense.to(dtype), bits, group)
        order = torch.randperm(SIZE, generator=draw).to(self.device) if kind == "order" else None
        return PackedWeight(words, scale, group, bits=bits, order=order)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize(
        "kind",
        [
            "fp8", "int8", "fp8 blocks", "quantized inputs", "8 bits", "4 bits", "whole rows",
            "narrow groups", "zeros", "order",
        ],
    )  # fmt: skip
    def test_packed_linear(self, kind: str, tokens: int, dtype: torch.dtype) -> None:
        """Check every layout of a quantized weight; plain, gated, between a norm and a residual."""
        x = self.draw(tokens, SIZE, dtype=dtype)
        weight, both = (self.packed(kind, rows, dtype) for rows in (OUTPUTS, 2 * OUTPUTS))
        cases, gated = (self.product_cases(dtype, n) for n in (OUTPUTS, 2 * OUTPUTS))
        residual = self.draw(tokens, OUTPUTS, dtype=dtype, seed=8)
        times = 3.0
        if kind == "quantized inputs":
            times = max(times, self.quantized_inputs / self.tolerance[dtype])
        every = {**cases[1], **cases[2], "residual": residual}
        for case in (*cases, {"residual": residual}, every):
            self.compare("packed_linear", dtype, x, weight, times=times, **case)
        for case in (gated[0], {**gated[1], **gated[2]}):
            self.compare("packed_linear", dtype, x, both, times=times, gated=True, **case)

    # -------------------------------------------------------------- experts

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

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize(
        "kind", ["plain", "biases", "gelu", "no gates", "4 bits", "fp8", "rows", "foreign"]
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
        if kind in ("4 bits", "fp8"):
            gate_up: Any = self.packed(kind, number * 2 * inner, dtype)
            words, scale = round_to_words(
                self.draw(number * SIZE, inner, dtype=dtype, seed=5, scale=inner**-0.5), 4, 32
            )
            down: Any = PackedWeight(words, scale, 32, bits=4)
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

    # -------------------------------------------------------------- attention's neighbours

    @pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 80), (8, 1, 128)])
    @pytest.mark.parametrize("case", ["plain", "rotated", "normed", "both", "partly rotated"])
    def test_heads(self, case: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        layout = HeadLayout(*heads)
        for tokens in (1, 7):
            qkv, *rest = self.projection(layout, tokens, case, dtype)
            want = REFERENCE.heads(qkv.float(), layout, *map(wide, rest))
            got = self.make(dtype).heads(qkv.clone(), layout, *rest)
            for name, one, other in zip(("query", "key", "value"), got, want, strict=True):
                assert one.dtype == dtype and one.shape == other.shape, name
                self.near(one, other, dtype, times=2)

    def projection(self, layout: HeadLayout, tokens: int, case: str, dtype: torch.dtype) -> Any:
        """Return qkv, positions, cos_sin, query_norm, key_norm."""
        heads, kv_heads, dim = layout
        qkv = self.draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        positions = torch.arange(tokens, device=self.device) * 5 + 3
        cos_sin = None
        if case != "plain" and case != "normed":
            rotary = dim // 2 if case == "partly rotated" else dim
            turns = 100.0 ** -torch.linspace(0, 1, rotary // 2)
            angles = torch.arange(64)[:, None] * turns
            cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.device)
        norms: list[Norm | None] = [None, None]
        if case in ("normed", "both"):
            norms = [self.norm(dim, dtype, seed=n) for n in (3, 4)]
        return qkv, positions, cos_sin, *norms

    @pytest.mark.parametrize("case", ["plain", "rotated", "both"])
    def test_cached_heads(self, case: str, dtype: torch.dtype) -> None:
        """Check what is written to the cache, and that nothing else of it changes."""
        layout = HeadLayout(4, 2, 64)
        given = self.projection(layout, 5, case, dtype)
        got, want = self.cached(layout, given, dtype, (1.0, 1.0))
        self.near(got, want, dtype, times=4)

    @pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
    def test_cached_heads_in_fp8(self, kind: str, dtype: torch.dtype) -> None:
        """Numbers are divided by the scales.

        fp8 represents all numbers exactly, so nothing depends on rounding.
        """
        layout, fp8 = HeadLayout(4, 2, 64), getattr(torch, kind)
        qkv, *rest = self.projection(layout, 5, "plain", dtype)
        qkv = (qkv * 2).round().clamp(-6, 6) / 2
        got, want = self.cached(layout, (qkv, *rest), fp8, (2.0**-3, 2.0**-5))
        assert torch.equal(got, want)

    def test_an_fp8_cache_is_cut_off_at_its_largest(self, dtype: torch.dtype) -> None:
        layout = HeadLayout(4, 2, 64)
        qkv, *rest = self.projection(layout, 5, "plain", dtype)
        qkv.fill_(1.0)
        qkv[1, ::7], qkv[2, ::5] = 96.0, -96.0
        got, want = self.cached(layout, (qkv, *rest), torch.float8_e4m3fn, (2.0**-3, 2.0**-5))
        assert torch.equal(got, want) and float(want.max()) == torch.finfo(torch.float8_e4m3fn).max

    def cached(
        self, layout: HeadLayout, given: Any, kind: torch.dtype, scales: tuple[float, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cached numbers of the tokens, [2, tokens, ...] float32, and the expected
        ones."""
        slots = torch.tensor([9, 3, 30, 31, 0], device=self.device)
        empty = torch.full((2, 4, 8, 2, 64), 0.125, device=self.device).to(kind)
        caches = [empty.clone(), empty.clone()]
        qkv, *rest = given
        each: list[Any] = [self.make(qkv.dtype), REFERENCE]
        results = [
            operations.cached_heads(qkv.clone(), layout, *rest, cache, slots, scales)
            for operations, cache in zip(each, caches, strict=True)
        ]
        for one, other in zip(*results, strict=True):
            self.near(one, other, qkv.dtype, times=4)
        apart = empty.clone()
        each[0].write_cache(*(part.clone() for part in results[0][1:]), apart, slots, scales)
        assert torch.equal(apart.view(torch.uint8), caches[0].view(torch.uint8)), "write_cache"
        others = [n for n in range(32) if n not in slots.tolist()]
        after, before = (
            part.view(torch.uint8).flatten(1, 2)[:, others] for part in (caches[0], empty)
        )
        assert torch.equal(after, before), "slots of others were written"
        got, want = (cache.float().flatten(1, 2)[:, slots] for cache in caches)
        return got, want

    def test_bidirectional_attention(self, dtype: torch.dtype) -> None:
        """Attend to rows of different lengths in one step, each separately."""
        lengths = (5, 1, 17, 17, 3, 40)
        starts = np.cumsum([0, *lengths])
        parts = [self.draw(int(starts[-1]), 4, 32, dtype=dtype, seed=n) for n in range(3)]
        rows = RaggedRows.of(starts, self.device)
        query, key, value = (part.clone() for part in parts)
        got = self.make(dtype).bidirectional_attention(query, key, value, rows, 0.3)
        assert got.dtype == dtype
        for start, length in zip(starts, lengths, strict=False):
            own = slice(int(start), int(start) + length)
            query, key, value = (part[own].float().transpose(0, 1) for part in parts)
            weights = (query @ key.transpose(1, 2) * 0.3).softmax(-1)
            self.near(got[own], (weights @ value).transpose(0, 1), dtype, times=2)

    # -------------------------------------------------------------- refusals

    def test_refusals_are_stated(self) -> None:
        """The refusal is None, or one line with the reason, for any argument."""
        for device in ("cpu", "cuda", "meta"):
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                reason = self.registered().supports(torch.device(device), dtype)
                assert reason is None or (reason.strip() and "\n" not in reason)


def copied_all(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the arguments, tensors included."""
    return {key: copied(value) for key, value in arguments.items()}
