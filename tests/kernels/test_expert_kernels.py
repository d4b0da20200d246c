"""A mixture's kernels against the torch reference: who is chosen, who goes where, what is made."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from helpers import few_interpreted

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.nn.activations import ClampedSwiGLU, ExpertActivation, LimitedSwiGLU
from jackfield.core.nn.layer_operations.experts import ExpertWeight
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized_weight import (
    QuantizedWeight,
    dequantize,
    e2m1_run,
    pack_e2m1,
    pack_words,
)
from jackfield.core.nn.routing import Routing, RoutingRule
from jackfield.kernels.moe.combine import combine
from jackfield.kernels.moe.expert_matmul import expert_matmul, most_tiles
from jackfield.kernels.moe.sort_tokens import sort_tokens
from jackfield.kernels.quant.quantize_rows import quantize_rows
from jackfield.plugins.operations.experts import experts_serve, few_slots
from jackfield.plugins.operations.triton import TritonOperations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
REFERENCE, KERNELS = Operations(), TritonOperations()


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def routing(num_tokens: int, top_k: int, num_experts: int, seed: int = 0) -> Routing:
    return REFERENCE.route(
        draw(num_tokens, num_experts, seed=seed), RoutingRule(top_k, renormalize=True)
    )


def dense(num_experts: int, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (draw(num_experts * rows, size, seed=rows) / size**0.5).to(dtype)


def packed(kind: str, total: int, size: int, group: int, dtype: torch.dtype) -> QuantizedWeight:
    """A random bank of about unit rows."""
    generator = torch.Generator().manual_seed(total + size)
    groups, bits, zero, run = -(-size // group), 8, None, None
    scale_rows = 16 if kind == "fp8" and groups > 1 else 1
    if kind == "fp8":
        values, spread = (torch.randn(total, size, generator=generator) * 64).to(FP8), 64.0
    elif kind == "int8":
        values = torch.randint(-127, 128, (total, size), generator=generator, dtype=torch.int8)
        spread = 74.0
    elif kind == "e2m1":
        bits, spread, run = 4, 2.8, e2m1_run(size, group)
        assert run is not None
        values = pack_e2m1(torch.randint(0, 16, (total, size), generator=generator), run)
    else:
        bits = int(kind[-1])
        spread = 0.29 * (1 << bits)
        values = pack_words(torch.randint(0, 1 << bits, (total, size), generator=generator), bits)
        if kind.startswith("zero"):
            most = (1 << bits) - bits // 8
            zero = torch.randint(0, most + 1, (groups, total), generator=generator).to(torch.uint8)
    scale = torch.rand(groups, -(-total // scale_rows), generator=generator) + 0.5
    weight = QuantizedWeight(
        values, (scale / spread / size**0.5).to(dtype), group, zero, scale_rows, bits,
        e2m1_run=run,
    )  # fmt: skip
    parts = {name: part.to(DEVICE) for name, part in weight.tensors().items()}
    return weight._replace(**parts)


def check(
    x: torch.Tensor, route: Routing, gate_up: ExpertWeight, down: ExpertWeight, **more: Any
) -> None:
    """Against the twin in float32: rounding is the kernels' alone."""
    residual = draw(*x.shape, dtype=x.dtype, seed=9)
    wide = [bank.float() if isinstance(bank, torch.Tensor) else bank for bank in (gate_up, down)]
    exact = {
        name: value.float() if isinstance(value, torch.Tensor) else value
        for name, value in more.items()
    }
    expected = REFERENCE.experts(x.float(), route, *wide, residual=residual.float(), **exact)
    assert experts_serve(gate_up, down)
    actual = KERNELS.experts(x, route, gate_up, down, residual=residual, **more)
    assert actual.dtype == x.dtype and actual.shape == x.shape
    tolerance = TOLERANCE[x.dtype]
    size = max(float(expected.std()), 1.0)
    torch.testing.assert_close(actual.float(), expected, atol=tolerance * size, rtol=tolerance)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 128, 8), (9, 60, 4), (6, 5, 5), (3, 8, 2)]
)
def test_a_routing_equals_its_twin(
    num_tokens: int, num_experts: int, top_k: int, renormalize: bool
) -> None:
    logits = draw(num_tokens, num_experts, dtype=torch.float16) * 4
    # Equal ones, at the top and at the end, and some whose probability is nothing.
    logits[0, 1::2] = logits[0].max()
    logits[-1] = 1.0
    logits[-1, 0] = 300.0
    actual = KERNELS.route(logits, RoutingRule(top_k, renormalize=renormalize))
    expected = REFERENCE.route(logits, RoutingRule(top_k, renormalize=renormalize))
    assert torch.equal(actual.experts, expected.experts)
    torch.testing.assert_close(actual.weights, expected.weights)


@pytest.mark.parametrize(
    ("num_experts", "rule"),
    [
        (64, RoutingRule(6, "sigmoid", True, groups=8, top_groups=4, factor=2.5)),
        (60, RoutingRule(4, groups=5, top_groups=2, factor=16.0)),
        (6, RoutingRule(3, "sigmoid", groups=6, top_groups=3)),
        (60, RoutingRule(4, renormalize=True, first=30)),
    ],
    ids=["V3", "V2", "groups of one", "second of two ranks"],
)
def test_a_routing_in_groups_equals_its_twin(num_experts: int, rule: RoutingRule) -> None:
    """With a bias, where scores are sigmoids, that may be negative."""
    logits = draw(9, num_experts, dtype=torch.float32) * 2
    logits[0, 1::2] = logits[0].max()
    if rule.scoring == "sigmoid":
        rule = rule._replace(bias=draw(num_experts, seed=1) - 0.7)
    actual, expected = KERNELS.route(logits, rule), REFERENCE.route(logits, rule)
    assert torch.equal(actual.experts, expected.experts)
    torch.testing.assert_close(actual.weights, expected.weights)


def test_a_routing_of_no_numbers_stays_among_the_experts() -> None:
    logits = torch.full((3, 37), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    for rule in (RoutingRule(4, renormalize=True), RoutingRule(4, groups=37, top_groups=5)):
        expert_ids = KERNELS.route(logits, rule).experts
        assert ((expert_ids >= 0) & (expert_ids < 37)).all()
        assert all(len(set(row)) == 4 for row in expert_ids.tolist())


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_lists_hold_each_slot_at_its_expert(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, min(num_experts, 5)))
    num_tokens = data.draw(st.integers(1, 70))
    permutation = st.permutations(range(num_experts))
    rows = data.draw(st.lists(permutation, min_size=num_tokens, max_size=num_tokens))
    experts = torch.tensor([row[:top_k] for row in rows], dtype=torch.int32, device=DEVICE)
    slots, counts = sort_tokens(experts, num_experts)
    flat = experts.flatten()
    for expert in range(num_experts):
        expected = (flat == expert).nonzero()[:, 0]
        assert slots[expert, : counts[expert]].tolist() == expected.tolist()
    block_m = data.draw(st.sampled_from([1, 4, 16]))
    needed = int((-(-counts // block_m)).sum())
    assert needed <= most_tiles(flat.numel(), num_experts, block_m)


def test_lists_of_more_tokens_than_a_program_takes_at_once() -> None:
    expert_ids = routing(2500, 3, 7).experts
    slots, counts = sort_tokens(expert_ids, 7)
    for expert in range(7):
        expected = (expert_ids.flatten() == expert).nonzero()[:, 0]
        assert torch.equal(slots[expert, : counts[expert]].long(), expected)


def test_lists_of_a_broken_routing_do_not_overflow() -> None:
    expert_ids = torch.tensor([[2, 2], [-7, 9], [2, 1 << 30]], dtype=torch.int32, device=DEVICE)
    slots, counts = sort_tokens(expert_ids, 3)
    assert counts.tolist() == [0, 0, 2]
    assert slots[2, :2].tolist() == [1, 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_equal_torch(dtype: torch.dtype) -> None:
    parts, residual = draw(15, 1100, dtype=dtype), draw(5, 1100, dtype=dtype, seed=1)
    weights = draw(5, 3, seed=2)
    expected = residual.float() + (parts.view(5, 3, 1100).float() * weights[:, :, None]).sum(dim=1)
    actual = combine(parts, weights, residual, residual)
    assert actual is residual
    torch.testing.assert_close(
        actual, expected.to(dtype), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


SHAPES = [  # tokens, experts, top_k, hidden, inner
    (1, 5, 2, 96, 48), (1, 16, 8, 64, 32), (2, 12, 3, 40, 72),
    (3, 5, 2, 96, 48), (19, 6, 3, 40, 72), (150, 5, 2, 64, 80),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "dtype"),
    few_interpreted(
        itertools.product(SHAPES, DTYPES),
        [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[0], torch.float16)],
    ),
    ids=str,
)
def test_experts_equal_their_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    num_tokens, num_experts, top_k, hidden, inner = shape
    gate_up = dense(num_experts, 2 * inner, hidden, dtype)
    down = dense(num_experts, hidden, inner, dtype)
    check(
        draw(num_tokens, hidden, dtype=dtype),
        routing(num_tokens, top_k, num_experts),
        gate_up,
        down,
    )


CLAMPED = ClampedSwiGLU(alpha=1.702, limit=0.9)
"""A limit that a third of unit gates are above."""
LIMITED = LimitedSwiGLU(0.4)


def biases(num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "gate_up_bias": draw(num_experts * 2 * inner, dtype=dtype, seed=21),
        "down_bias": draw(num_experts * hidden, dtype=dtype, seed=22),
    }


@pytest.mark.parametrize(
    ("shape", "dtype", "activation"),
    few_interpreted(
        itertools.product(SHAPES, DTYPES, [None, CLAMPED, LIMITED, "gelu"]),
        [
            *((shape, torch.float32, CLAMPED) for shape in SHAPES[::2]),
            (SHAPES[1], torch.float16, None), (SHAPES[3], torch.float32, None),
            (SHAPES[1], torch.float32, "gelu"), (SHAPES[3], torch.float32, "gelu"),
            (SHAPES[1], torch.float32, LIMITED), (SHAPES[3], torch.float32, LIMITED),
        ],
    ),
    ids=str,
)  # fmt: skip
def test_experts_with_biases_equal_their_twin(
    shape: tuple[int, ...], dtype: torch.dtype, activation: ExpertActivation | None
) -> None:
    num_tokens, num_experts, top_k, hidden, inner = shape
    check(
        draw(num_tokens, hidden, dtype=dtype),
        routing(num_tokens, top_k, num_experts),
        dense(num_experts, 2 * inner, hidden, dtype),
        dense(num_experts, hidden, inner, dtype),
        **biases(num_experts, hidden, inner, dtype),
        activation=activation,
    )


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
@pytest.mark.parametrize("kind", ["dense", "fp8", "int8", "words4"])
def test_experts_without_gates_equal_their_twin(kind: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[-1]
    num_tokens, num_experts, top_k, hidden, inner = (*shape[:3], 64, 128)
    up, down = ((num_experts * inner, hidden), (num_experts * hidden, inner))
    if kind == "dense":
        banks: list[Any] = [dense(num_experts, n // num_experts, m, dtype) for n, m in (up, down)]
    else:
        banks = [packed(kind, *size, group, dtype) for size, group in ((up, 64), (down, 32))]
    check(
        draw(num_tokens, hidden, dtype=dtype), routing(num_tokens, top_k, num_experts), *banks,
        activation="relu2",
    )  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 11])
@pytest.mark.parametrize("kind", ["fp8", "words4"])
def test_packed_experts_with_biases_equal_their_twin(kind: str, num_tokens: int) -> None:
    dtype, hidden, inner = DTYPES[-1], 64, 128
    check(
        draw(num_tokens, hidden, dtype=dtype),
        routing(num_tokens, 2, 3),
        packed(kind, 3 * 2 * inner, hidden, 64, dtype),
        packed(kind, 3 * hidden, inner, 32, dtype),
        **biases(3, hidden, inner, dtype),
        activation=CLAMPED,
    )


def test_experts_too_narrow_for_the_kernels_have_biases_too() -> None:
    gate_up = packed("words4", 3 * 64, 64, 8, torch.float32)
    down = packed("words4", 3 * 64, 32, 8, torch.float32)
    x, route, more = draw(5, 64), routing(5, 2, 3), biases(3, 64, 32, torch.float32)
    outputs = [
        operations.experts(x, route, gate_up, down, residual=x.clone(), **more, activation=CLAMPED)
        for operations in (REFERENCE, KERNELS)
    ]
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_a_clamp_keeps_what_is_no_number(num_tokens: int) -> None:
    """Else a broken activation would look like a large one."""
    x, route = draw(num_tokens, 64), routing(num_tokens, 2, 3)
    x[0, 5] = float("nan")
    gate_up = dense(3, 64, 64, torch.float32)
    down = dense(3, 64, 32, torch.float32)
    actual = KERNELS.experts(x, route, gate_up, down, residual=draw(num_tokens, 64),
                           activation=CLAMPED)  # fmt: skip
    assert actual[0].isnan().all() and actual[1:].isfinite().all()


def test_one_expert_may_have_all_tokens_and_others_none() -> None:
    num_tokens, num_experts = 40, 6
    route = Routing(
        torch.full((num_tokens, 1), 0.5, device=DEVICE),
        torch.full((num_tokens, 1), 4, dtype=torch.int32, device=DEVICE),
    )
    gate_up = dense(num_experts, 64, 32, torch.float32)
    check(draw(num_tokens, 32), route, gate_up, dense(num_experts, 32, 32, torch.float32))


def test_ids_that_are_no_experts_read_no_others_memory() -> None:
    """As a graph's warm-up may have them."""
    ids = torch.tensor([[1 << 30, -5]], dtype=torch.int32, device=DEVICE)
    x, weights = draw(1, 32), torch.ones(1, 2, device=DEVICE)
    gate_up, down = dense(5, 64, 32, torch.float32), dense(5, 32, 32, torch.float32)
    clamped = Routing(weights, ids.clamp(0, 4))
    expected = REFERENCE.experts(x, clamped, gate_up, down, residual=x.clone())
    actual = KERNELS.experts(x, Routing(weights, ids), gate_up, down, residual=x.clone())
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_tokens_do_not_depend_on_those_beside_them() -> None:
    gate_up, down = dense(6, 64, 32, torch.float16), dense(6, 32, 32, torch.float16)
    x, route = draw(20, 32, dtype=torch.float16), routing(20, 2, 6)
    whole = KERNELS.experts(x, route, gate_up, down, residual=x.clone())
    half = Routing(route.weights[:9], route.experts[:9])
    part = KERNELS.experts(x[:9], half, gate_up, down, residual=x[:9].clone())
    assert torch.equal(whole[:9], part)


BANKS = [  # kind, hidden, inner, group of gate and up, group of down
    ("fp8", 96, 48, 96, 48), ("fp8", 96, 64, 32, 32), ("int8", 72, 40, 72, 40),
    ("words4", 128, 128, 16, 32), ("zeros4", 128, 128, 32, 16), ("words8", 128, 64, 64, 64),
    ("zeros8", 128, 64, 32, 16), ("zeros4", 64, 128, 64, 128),
    ("e2m1", 320, 160, 32, 32), ("e2m1", 144, 128, 16, 16),
]  # fmt: skip


COUNTS = [(11, torch.float32), *((count, DTYPES[-1]) for count in (1, 11, 80))]


@pytest.mark.parametrize(
    ("bank", "num_tokens", "dtype"),
    few_interpreted(
        [(bank, *count) for bank in BANKS for count in COUNTS],
        [(bank, *COUNTS[1 + index % 3]) for index, bank in enumerate(BANKS)]
        + [(bank, *COUNTS[0]) for bank in BANKS[1::3]],
    ),
    ids=str,
)
def test_experts_of_packed_banks_equal_their_twin(
    bank: Any, num_tokens: int, dtype: torch.dtype
) -> None:
    kind, hidden, inner, group, inner_group = bank
    num_experts, top_k = 3, 2
    gate_up = packed(kind, num_experts * 2 * inner, hidden, group, dtype)
    down = packed(kind, num_experts * hidden, inner, inner_group, dtype)
    x, route = draw(num_tokens, hidden, dtype=dtype), routing(num_tokens, top_k, num_experts)
    check(x, route, gate_up, down)


def check_in_8_bits(kind: str, num_tokens: int, top_k: int, rows: int, size: int) -> None:
    """Gated (with biases) and not, from a row a token and from a row a slot, against inputs rounded
    as well."""
    num_experts = 8
    bank = packed(kind, num_experts * rows, size, size, torch.float32)
    route = routing(num_tokens, top_k, num_experts)
    lists = sort_tokens(route.experts, num_experts)
    flat = route.experts.flatten().long()
    for gated, each in ((True, top_k), (False, 1)):
        x = draw(num_tokens * top_k // each, size, dtype=DTYPES[-1], seed=7)
        values, scales = quantize_rows(x, bank.values.dtype)
        bias = draw(num_experts * rows, dtype=x.dtype, seed=8) if gated else None
        actual = expert_matmul(
            values, *lists, QuantizedWeight(bank.values, bank.scale, size),
            top_k=top_k, gated=gated, x_scale=scales, bias=bias, dtype=x.dtype,
        )  # fmt: skip
        rounded = (values.float() * scales[:, None]).repeat_interleave(each, dim=0)
        expected = torch.empty(len(flat), rows // 2 if gated else rows, device=DEVICE)
        dense = dequantize(bank, torch.float32).view(num_experts, rows, size)
        for expert in range(num_experts):
            product = rounded[flat == expert] @ dense[expert].t()
            if bias is not None:
                product = product + bias.view(num_experts, rows)[expert].float()
                gate, up = product.chunk(2, dim=1)
                product = torch.nn.functional.silu(gate) * up
            expected[flat == expert] = product
        assert actual.dtype == x.dtype
        tolerance = TOLERANCE[x.dtype]
        torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("num_tokens", [5, 70])
@pytest.mark.parametrize("size", [64, 40])
def test_a_product_in_8_bits_equals_that_of_rounded_inputs(
    kind: str, num_tokens: int, size: int
) -> None:
    check_in_8_bits(kind, num_tokens, 2, 96, size)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_inputs_are_taken_in_the_order_of_a_banks_columns(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(5)
    gate_up = packed("words4", 3 * 128, 128, 32, torch.float32)
    down = packed("words4", 3 * 128, 64, 64, torch.float32)
    gate_up = gate_up._replace(order=torch.randperm(128, generator=generator).to(DEVICE))
    down = down._replace(order=torch.randperm(64, generator=generator).to(DEVICE))
    check(draw(num_tokens, 128), routing(num_tokens, 2, 3), gate_up, down)


def test_groups_too_narrow_for_the_kernels_go_to_the_reference() -> None:
    gate_up = packed("words4", 3 * 64, 64, 8, torch.float32)
    down = packed("words4", 3 * 64, 32, 8, torch.float32)
    assert not experts_serve(gate_up, down)
    x, route = draw(5, 64), routing(5, 2, 3)
    expected = REFERENCE.experts(x, route, gate_up, down, residual=x)
    actual = KERNELS.experts(x, route, gate_up, down, residual=x.clone())
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_few_slots_are_at_most_half_as_many_as_experts() -> None:
    assert few_slots(1, 8, 8) and few_slots(8, 8, 128) and few_slots(2, 2, 8)
    assert not few_slots(9, 8, 128) and not few_slots(3, 2, 8)


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
E, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
"""Qwen3-30B-A3B's"""


def big(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def big_layer() -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = big(E * 2 * INNER, HIDDEN, seed=1).div_(HIDDEN**0.5)
    return gate_up, big(E * HIDDEN, INNER, seed=2).div_(INNER**0.5)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 64, 256, 700, 2000])
def test_experts_of_a_real_size_equal_their_twin(num_tokens: int) -> None:
    gate_up, down = big_layer()
    logits, x = big(num_tokens, E, seed=3), big(num_tokens, HIDDEN, seed=4)
    route = KERNELS.route(logits, RoutingRule(TOP_K, renormalize=True))
    expected = REFERENCE.route(logits, RoutingRule(TOP_K, renormalize=True))
    torch.testing.assert_close(route.weights, expected.weights)
    # Logits of few digits are often equal: order decides, and must not differ.
    assert torch.equal(route.experts, expected.experts)
    check(x, route, gate_up, down)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks", "fp8 narrow", "words4", "zeros4", "e2m1"])
@pytest.mark.parametrize("num_tokens", [1, 64, 700])
def test_packed_experts_of_a_real_size_equal_their_twin(num_tokens: int, kind: str) -> None:
    def bank(total: int, size: int) -> QuantizedWeight:
        group = {"fp8": size, "fp8 narrow": 32, "e2m1": 32}.get(kind, 128)
        return packed(kind.split()[0], total, size, group, torch.float32)

    gate_up, down = bank(16 * 2 * INNER, HIDDEN), bank(16 * HIDDEN, INNER)
    route = KERNELS.route(big(num_tokens, 16, seed=3), RoutingRule(TOP_K, renormalize=True))
    check(big(num_tokens, HIDDEN, seed=4), route, gate_up, down)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("num_tokens", [2, 9, 20, 90, 700])
def test_a_real_product_in_8_bits_equals_that_of_rounded_inputs(num_tokens: int, kind: str) -> None:
    check_in_8_bits(kind, num_tokens, TOP_K, 2 * INNER, HIDDEN)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("num_tokens", [9, 700])
def test_whole_layers_in_8_bits_stay_near_their_twin(num_tokens: int, kind: str) -> None:
    """As near as rounding inputs to 8 bits, twice, leaves them."""
    gate_up = packed(kind, 16 * 2 * INNER, HIDDEN, HIDDEN, torch.float32)
    down = packed(kind, 16 * HIDDEN, INNER, INNER, torch.float32)
    route = KERNELS.route(big(num_tokens, 16, seed=3), RoutingRule(TOP_K, renormalize=True))
    x, residual = big(num_tokens, HIDDEN, seed=4), big(num_tokens, HIDDEN, seed=9)
    expected = REFERENCE.experts(x.float(), route, gate_up, down, residual=residual.float())
    gate_up, down = (bank._replace(inputs="quantized") for bank in (gate_up, down))
    actual = KERNELS.experts(x, route, gate_up, down, residual=residual.clone())
    off = (actual.float() - expected).norm() / (expected - residual.float()).norm()
    assert 1e-4 < off < 0.06


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 64, 256, 2000])
def test_experts_of_gpt_oss_equal_their_twin(num_tokens: int, mxfp4: bool) -> None:
    """Rows that are no power of two, biases, and the clamped activation."""
    experts, size = 32, 2880
    gate_up = big(experts * 2 * size, size, seed=1).div_(size**0.5)
    down = big(experts * size, size, seed=2).div_(size**0.5)
    banks: list[ExpertWeight] = [gate_up, down]
    if mxfp4:
        banks = [
            QuantizedWeight(
                (bank * 54).to(FP8), torch.full((size // 32, len(bank)), 1 / 54, device=DEVICE), 32
            )
            for bank in (gate_up, down)
        ]
    route = KERNELS.route(big(num_tokens, experts, seed=3), RoutingRule(4, renormalize=True))
    more = {
        "gate_up_bias": big(experts * 2 * size, seed=5),
        "down_bias": big(down.shape[0], seed=6),
    }
    x = big(num_tokens, size, seed=4)
    check(x, route, banks[0], banks[1], **more, activation=ClampedSwiGLU(1.702, 7.0))


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_a_captured_layer_goes_where_other_inputs_send_it(num_tokens: int) -> None:
    gate_up, down = big_layer()
    logits, x = big(num_tokens, E, seed=3), big(num_tokens, HIDDEN, seed=4)

    def layer() -> torch.Tensor:
        route = KERNELS.route(logits, RoutingRule(TOP_K, renormalize=True))
        return KERNELS.experts(x, route, gate_up, down, residual=x.clone())

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        first = layer().clone()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    graph.replay()
    assert torch.equal(captured, first)
    for seed in (5, 6, 7):
        logits.copy_(big(num_tokens, E, seed=seed))
        x.copy_(big(num_tokens, HIDDEN, seed=seed + 10))
        if seed == 7:
            # All to the same few.
            logits[:, 40:48] += 100
        for _ in range(3):
            graph.replay()
        assert torch.equal(captured, layer())
        assert not torch.equal(captured, first)
