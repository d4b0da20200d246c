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

import pytest
import torch

from ...core.nn.activations import ACTIVATIONS
from ...core.nn.operations import CenteredNorm, Norm, NormSums, Operations, PositionRows
from ...core.nn.quantized_weight import (
    QuantizedWeight,
    e2m1_run,
    pack_e2m1,
    pack_words,
    round_to_fp8,
    round_to_int8,
    round_to_words,
)
from .adapter_operations import AdapterChecks
from .batch_operations import BatchChecks
from .expert_operations import ExpertChecks
from .head_operations import HeadChecks
from .invariance import InvariantOperations
from .kit import DeviceKit
from .operation_arguments import REFERENCE, SIZE, TOKENS, copied, copied_all, tensors, wide
from .quantized_caches import QuantizedCacheChecks
from .states import StateChecks

OUTPUTS = 96
GREATEST = 3.0
"""No result of a case is far beyond this, so tolerances are absolute."""


class OperationsKit(
    HeadChecks, ExpertChecks, BatchChecks, AdapterChecks, QuantizedCacheChecks, StateChecks,
    InvariantOperations, DeviceKit,
):  # fmt: skip
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
    quantized_inputs: ClassVar[float] = 0.1
    """Allowed error of a product if a weight lets its inputs be rounded to 8 bits: a quotient that
    two devices round differently is a step of 8 bits away."""

    # -------------------------------------------------------------- what tests are made of

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize each test over `dtypes`."""
        if "dtype" in metafunc.fixturenames:
            kinds = [getattr(torch, name) for name in self.dtypes]
            metafunc.parametrize("dtype", kinds, ids=self.dtypes)

    def make(self, dtype: torch.dtype) -> Operations:
        """Create an instance; the test is skipped if it is refused."""
        kind = self.registered()
        reason = kind.supports(self.device, dtype)
        if reason is not None:
            name = str(dtype).removeprefix("torch.")
            assert name not in self.promised, f"{self.name} promises {name}, and says: {reason}"
            pytest.skip(f"{self.name}: {reason}")
        operations: Operations = kind()
        return operations

    def draw(self, *shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Any:
        generator = torch.Generator().manual_seed(seed + 17 * len(shape))
        return (torch.randn(*shape, generator=generator) * scale).to(self.device, dtype)

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
        arguments = [copied(value) for value in args]
        named = {key: copied(value) for key, value in more.items()}
        got = getattr(operations, name)(*arguments, **named)
        exact = {key: wide(value) for key, value in more.items()}
        want = getattr(REFERENCE, name)(*map(wide, args), **copied_all(exact))
        assert got.dtype == dtype, f"{name} gives {got.dtype} for {dtype}"
        self.near(got, want, dtype, times)
        kept = [*zip(args, arguments, strict=True)]
        kept += [(more[key], named[key]) for key in more if key not in overwrites]
        for before, after in kept:
            for was, now in zip(tensors(before), tensors(after), strict=True):
                assert torch.equal(was.view(torch.uint8), now.view(torch.uint8)), (
                    f"{name} overwrites what it was given"
                )

    # -------------------------------------------------------------- norms and activations

    def test_embed(self, dtype: torch.dtype) -> None:
        """Embed tokens, scale them, and add rows of their positions."""
        operations = self.make(dtype)
        weight, table = (self.draw(40, SIZE, dtype=dtype, seed=n) for n in (1, 2))
        for tokens in TOKENS:
            ids = (torch.arange(tokens, device=self.device) * 7 + 3) % 40
            rows = PositionRows((ids + 5) % 40, table)
            assert torch.equal(operations.embed(ids, weight), weight[ids])
            for more in ({"factor": 2.5}, {"positions": rows}, {"factor": 2.5, "positions": rows}):
                got, want = (each.embed(ids, weight, **more) for each in (operations, REFERENCE))
                assert got.dtype == dtype
                self.near(got, want, dtype)

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
        self,
        dtype: torch.dtype,
        rows: int,
        name: str = "quantized_linear",
        weight: torch.Tensor | None = None,
    ) -> list[dict[str, Any]]:
        """Return the arguments of a method besides x and the weight, a dense one where it is
        given."""
        bias = self.draw(rows, dtype=dtype, seed=7)
        cases: list[dict[str, Any]] = [{}, {"bias": bias}, {"norm": self.norm(SIZE, dtype)}]
        if f"{name}.layer_norm" in self.make(dtype).features:
            factors, offset = self.norm(SIZE, dtype).weight, self.draw(SIZE, dtype=dtype, seed=5)
            cases.append({"norm": CenteredNorm(factors, offset, 0.3), "bias": bias})
            if weight is not None and "linear.norm_sums" in self.make(dtype).features:
                wide = weight.float()
                sums = NormSums(wide @ factors.float(), wide @ offset.float() + bias.float())
                cases.append({"norm": CenteredNorm(factors, offset, 0.3, sums), "bias": bias})
                sums = sums._replace(offsets=bias.float())
                cases.append({"norm": CenteredNorm(factors, None, 0.3, sums), "bias": bias})
                sums = sums._replace(offsets=None)
                cases.append({"norm": CenteredNorm(factors, None, 0.3, sums)})
        return cases

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_linear(self, tokens: int, dtype: torch.dtype) -> None:
        """Multiply with a bias, a norm before, a residual after, and all of them."""
        weight = self.draw(OUTPUTS, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        x = self.draw(tokens, SIZE, dtype=dtype)
        residual = self.draw(tokens, OUTPUTS, dtype=dtype, seed=8)
        cases = self.product_cases(dtype, OUTPUTS, "linear", weight)
        every = {**cases[1], **cases[2], "residual": residual}
        cases += [{"residual": residual}, every]
        if "linear.factor" in self.make(dtype).features:
            cases += [{**every, "factor": 0.3}, {**cases[2], "factor": 0.3}]
        for case in cases:
            self.compare("linear", dtype, x, weight, times=2, **case)

    @pytest.mark.parametrize("tokens", TOKENS[:2])
    def test_activated_linear(self, tokens: int, dtype: torch.dtype) -> None:
        weight = self.draw(OUTPUTS, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        x = self.draw(tokens, SIZE, dtype=dtype)
        cases = self.product_cases(dtype, OUTPUTS, "activated_linear", weight)
        for number, activation in enumerate(ACTIVATIONS):
            case = cases[number % len(cases)]
            self.compare(
                "activated_linear", dtype, x, weight, times=2, activation=activation, **case
            )

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_gated_linear(self, tokens: int, dtype: torch.dtype) -> None:
        weight = self.draw(2 * OUTPUTS, SIZE, dtype=dtype, seed=6, scale=SIZE**-0.5)
        x = self.draw(tokens, SIZE, dtype=dtype)
        cases = self.product_cases(dtype, 2 * OUTPUTS, "gated_linear", weight)
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

    def packed(self, kind: str, rows: int, dtype: torch.dtype) -> QuantizedWeight:
        """Create a weight of `rows` rows in one of the layouts."""
        dense = self.draw(rows, SIZE, dtype=torch.float32, seed=6, scale=SIZE**-0.5)
        draw = torch.Generator().manual_seed(9)
        if kind in ("fp8", "int8", "quantized inputs"):
            values, scale = (round_to_int8 if kind == "int8" else round_to_fp8)(dense)
            inputs = "quantized" if kind == "quantized inputs" else "wide"
            return QuantizedWeight(values, scale[None], SIZE, inputs=inputs)  # type: ignore[arg-type]
        if kind == "fp8 blocks":
            values, _ = round_to_fp8(dense * SIZE**0.5 * 100, dim=None)
            scale = torch.rand(SIZE // 128, -(-rows // 32), generator=draw) + 0.5
            scale = (scale * SIZE**-0.5 / 300).to(self.device)
            return QuantizedWeight(values, scale, 128, scale_rows=32)
        if kind == "4-bit floats":
            run = e2m1_run(SIZE, 32)
            assert run is not None
            words = pack_e2m1(torch.randint(0, 16, (rows, SIZE), generator=draw), run)
            scale = (torch.rand(SIZE // 32, rows, generator=draw) + 0.5) / 3 / SIZE**0.5
            scale = scale.to(self.device, dtype)
            return QuantizedWeight(words.to(self.device), scale, 32, bits=4, e2m1_run=run)
        bits = 8 if kind == "8 bits" else 4
        group = {"narrow groups": 8, "whole rows": SIZE}.get(kind, 32)
        if kind == "zeros":
            numbers = torch.randint(0, 1 << bits, (rows, SIZE), generator=draw)
            zero = torch.randint(0, 1 << bits, (SIZE // group, rows), generator=draw)
            scale = (torch.rand(SIZE // group, rows, generator=draw) + 0.5) / 6 / SIZE**0.5
            return QuantizedWeight(
                pack_words(numbers, bits).to(self.device), scale.to(self.device, dtype), group,
                zero.to(torch.uint8).to(self.device), bits=bits,
            )  # fmt: skip
        words, scale = round_to_words(dense.to(dtype), bits, group)
        order = torch.randperm(SIZE, generator=draw).to(self.device) if kind == "order" else None
        return QuantizedWeight(words, scale, group, bits=bits, order=order)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize(
        "kind",
        [
            "fp8", "int8", "fp8 blocks", "quantized inputs", "8 bits", "4 bits", "whole rows",
            "narrow groups", "zeros", "order", "4-bit floats",
        ],
    )  # fmt: skip
    def test_quantized_linear(self, kind: str, tokens: int, dtype: torch.dtype) -> None:
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
            self.compare("quantized_linear", dtype, x, weight, times=times, **case)
        if kind == "quantized inputs":
            # Both factors have such an error.
            times *= 2
        for case in (gated[0], {**gated[1], **gated[2]}):
            self.compare("quantized_linear", dtype, x, both, times=times, gated=True, **case)

    # -------------------------------------------------------------- refusals

    def test_refusals_are_stated(self) -> None:
        """The refusal is None, or one line with the reason, for any argument."""
        for device in ("cpu", "cuda", "meta"):
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                reason = self.registered().supports(torch.device(device), dtype)
                assert reason is None or (reason.strip() and "\n" not in reason)
