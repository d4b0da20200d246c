"""Kernels over states, at lengths around their chunks, against one token after another in torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.state.operations import DeltaWeights, ScanWeights
from jackfield.core.nn.state.rows import StateRows
from jackfield.kernels.state import delta_rule, selective_scan
from jackfield.kernels.state.rows import WHOLE, longer_row
from jackfield.plugins.conformance.states import NUM_STATES, make_rows
from jackfield.plugins.operations.states import TritonStates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUDA = DEVICE.type == "cuda"
TOLERANCE = {torch.float32: 1e-4 if CUDA else 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if CUDA else ()))
"""The interpreter's products of bfloat16 are wrong."""
Sizes = Sequence[tuple[int, int]]
LENGTHS: dict[str, Sizes] = {
    "around chunks": ((15, 15), (64, 64), (130, 65), (17, 16), (2, 2)),
    "one of several chunks": ((200, 200),),
    "beside single tokens": ((9, 1), (3, 3), (1, 1), (100, 97), (50, 1)),
}
"""(tokens of the sequence, those of the step) of each row."""


class Subject:
    """A kind of layer: its inputs, and its operation."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    """Of the inputs of a token."""
    state_shape: tuple[int, ...]
    operation: str
    weights: Any
    """A named tuple; its tensors are moved to the device."""

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, *shape).to(self.dtype) for shape in self.shapes]

    def run(
        self, operations: Any, inputs: Sequence[torch.Tensor], state: torch.Tensor, rows: StateRows
    ) -> torch.Tensor:
        parts = (p.to(DEVICE) if isinstance(p, torch.Tensor) else p for p in self.weights)
        moved = [part.to(DEVICE) for part in inputs]
        operation = getattr(operations, self.operation)
        y: torch.Tensor = operation(*moved, type(self.weights)(*parts), state, rows)
        return y


class Selective(Subject):
    """Mamba. Its last input is the gate."""

    operation = "selective_scan"

    def __init__(self, dtype: torch.dtype, *, channels: int, states: int):
        self.dtype = dtype
        self.shapes = ((channels,), (channels,), (states,), (states,), (channels,))
        self.state_shape = (channels, states)
        self.weights = ScanWeights(
            -torch.rand(channels, states), torch.randn(channels), torch.randn(channels)
        )


class Delta(Subject):
    """A gated delta net."""

    operation = "delta_rule"

    def __init__(self, dtype: torch.dtype, *, heads: int, groups: int, keys: int, values: int):
        self.dtype = dtype
        self.shapes = ((groups, keys), (groups, keys), (heads, values), (heads,), (heads,))
        self.state_shape = (heads, keys, values)
        self.weights = DeltaWeights(-torch.rand(heads), torch.randn(heads))


def compare(
    subject: Subject,
    inputs: Sequence[torch.Tensor],
    rows: StateRows,
    mixed: StateRows | None = None,
    factor: float = 1.0,
) -> None:
    """The results and the states of the kernels and of torch are near; unused states are kept.
    mixed: the rows as a recorded step has them, for the kernels; factor: of the tolerance."""
    state = torch.randn(NUM_STATES, *subject.state_shape, device=DEVICE)
    state[rows.slots[rows.begins].long()] = float("nan")
    kept = state.clone()
    want_state, got_state = state.clone(), state
    want = subject.run(Operations(), inputs, want_state, rows)
    got = subject.run(TritonStates(), inputs, got_state, mixed or rows)
    error = factor * TOLERANCE[subject.dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=error, rtol=error)
    used = sorted(set(rows.slots.tolist()))
    torch.testing.assert_close(got_state[used], want_state[used], atol=error, rtol=error)
    others = [slot for slot in range(NUM_STATES) if slot not in used]
    assert torch.equal(got_state[others], kept[others])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", LENGTHS.values(), ids=LENGTHS)
def test_delta_rules_of_any_lengths(sizes: Sizes, dtype: torch.dtype) -> None:
    subject = Delta(dtype, heads=2, groups=1, keys=24, values=40)
    rows = make_rows(sizes, DEVICE)
    compare(subject, subject.inputs(rows.num_tokens), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", LENGTHS.values(), ids=LENGTHS)
def test_selective_scans_of_any_lengths(sizes: Sizes, dtype: torch.dtype) -> None:
    subject = Selective(dtype, channels=40, states=6)
    rows = make_rows(sizes, DEVICE)
    compare(subject, subject.inputs(rows.num_tokens), rows)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 0.7)], ids=str)
def test_a_selective_scan_limits_step_sizes_up_to_where_a_row_ends(
    limit: tuple[float, float],
) -> None:
    subject = Selective(torch.float32, channels=33, states=16)
    subject.weights = subject.weights._replace(a=subject.weights.a * 30, dt_limit=limit)
    rows = make_rows(((35, 35), (40, 19)), DEVICE)
    compare(subject, subject.inputs(rows.num_tokens), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_delta_rule_whose_keys_are_all_alike(dtype: torch.dtype) -> None:
    """Nothing decays, and each token replaces what the one before it has added: powers of a chunk's
    matrix reach 1e17, its inverse has numbers up to 1."""
    subject = Delta(dtype, heads=1, groups=1, keys=16, values=16)
    subject.weights = DeltaWeights(torch.full((1,), -1e-6), torch.zeros(1))
    rows = make_rows(((128, 128),), DEVICE)
    q, k, v, step, beta = subject.inputs(rows.num_tokens)
    compare(
        subject, [q, k[:1].expand_as(k).contiguous(), v, step, torch.full_like(beta, 9.0)], rows
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_delta_rule_that_forgets_within_a_chunk(dtype: torch.dtype) -> None:
    """exp of the sum of its decays is zero, and that of their negative infinite."""
    subject = Delta(dtype, heads=1, groups=1, keys=16, values=16)
    subject.weights = DeltaWeights(torch.full((1,), -60.0), torch.zeros(1))
    rows = make_rows(((70, 70), (90, 33)), DEVICE)
    compare(subject, subject.inputs(rows.num_tokens), rows)


@pytest.mark.parametrize("cut", [1, 15, 64, 99])
@pytest.mark.parametrize("kind", [Delta, Selective])
def test_a_prompt_in_two_steps_is_that_prompt(kind: type[Subject], cut: int) -> None:
    subject = (
        Delta(torch.float32, heads=2, groups=2, keys=16, values=20)
        if kind is Delta
        else Selective(torch.float32, channels=20, states=8)
    )
    length = 100
    inputs = subject.inputs(length)
    states = torch.full((2, NUM_STATES, *subject.state_shape), float("nan"), device=DEVICE)
    whole = subject.run(TritonStates(), inputs, states[0], make_rows(((length, length),), DEVICE))
    parts = [
        subject.run(TritonStates(), [part[at] for part in inputs], states[1], rows)
        for at, rows in (
            (slice(cut), make_rows(((cut, cut),), DEVICE)),
            (slice(cut, length), make_rows(((length, length - cut),), DEVICE)),
        )
    ]
    error = TOLERANCE[subject.dtype]
    torch.testing.assert_close(torch.cat(parts), whole, atol=error, rtol=error)
    torch.testing.assert_close(states[1], states[0], atol=error, rtol=error, equal_nan=True)


@pytest.mark.parametrize("kind", [Delta, Selective])
def test_few_programs_walk_over_many_prompts(
    kind: type[Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (delta_rule, selective_scan):
        monkeypatch.setattr(module, "MOST_ROWS", 2)
    subject = (
        Delta(torch.float16, heads=1, groups=1, keys=16, values=16)
        if kind is Delta
        else Selective(torch.float32, channels=20, states=8)
    )
    rows = make_rows(((3, 3), (5, 1), (20, 17), (2, 2), (70, 70), (31, 30)), DEVICE, mixed=True)
    host = make_rows(((3, 3), (5, 1), (20, 17), (2, 2), (70, 70), (31, 30)), DEVICE)
    compare(subject, subject.inputs(rows.num_tokens), host, rows)


@triton.jit
def _find_kernel(out_ptr, query_start_ptr, num_rows, CHUNK: tl.constexpr):
    row, part, chunks = longer_row(tl.program_id(0), query_start_ptr, num_rows, CHUNK)
    tl.store(out_ptr + 3 * tl.program_id(0), row)
    tl.store(out_ptr + 3 * tl.program_id(0) + 1, part)
    tl.store(out_ptr + 3 * tl.program_id(0) + 2, chunks)


@pytest.mark.parametrize("chunk", [4, int(WHOLE.value)])
def test_chunks_are_those_of_rows_of_several_tokens(chunk: int) -> None:
    """Rows of one token, and without tokens, have none; there are more rows than are read at
    once."""
    counts = [[1, 1, 5, 1, 0, 8, 2][at % 7] if at % 50 < 9 else 1 for at in range(600)]
    starts = [0, *itertools.accumulate(counts)]
    wanted = [
        (row, part)
        for row, count in enumerate(counts)
        if count > 1
        for part in range(-(-count // chunk))
    ]
    programs = len(wanted) + 2
    out = torch.empty(programs, 3, dtype=torch.int32, device=DEVICE)
    found = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    _find_kernel[(programs,)](out, found, len(counts), CHUNK=chunk)
    assert out[:, :2].tolist() == [list(place) for place in [*wanted, (-1, -1), (-1, -1)]]
    assert set(out[:, 2].tolist()) == {len(wanted)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Delta, Selective])
def test_prompts_at_published_sizes(kind: type[Subject], dtype: torch.dtype) -> None:
    """Qwen3-Next's and Falcon Mamba's layers."""
    subject = (
        Delta(dtype, heads=32, groups=16, keys=128, values=128)
        if kind is Delta
        else Selective(dtype, channels=8192, states=16)
    )
    rows = make_rows(((700, 700), (1, 1), (1000, 333), (129, 129), (40, 1), (9, 5)), DEVICE)
    # Of ten million float32 results on an H200, 63 were up to 1e-3 apart.
    factor = 20.0 if dtype == torch.float32 else 1.0
    compare(subject, subject.inputs(rows.num_tokens), rows, factor=factor)
