"""The kernels over states against their torch twins: outputs, and the states that they leave.

Rows of one token and of many, some of which continue a state; states of other slots stay as they
are, and what is left in the slot of a row that begins does not matter: here it is NaN.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.nn.state.operations import DeltaWeights, ScanWeights, StateOperations
from jackfield.core.nn.state.rows import StateRows
from jackfield.plugins.operations.states import TritonStates

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32, torch.float16]
# Products of tiles take float32 as tf32 where the inputs have 16 bits.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
NUM_STATES = 7
STEPS = {
    "decode": [(5, 1), (1, 1), (9, 1)],
    "prompts": [(1, 1), (6, 1), (2, 2), (71, 71), (40, 21), (9, 4)],
}
"""(tokens of the sequence, those of the step) of each row"""


def make_rows(sizes: Sequence[tuple[int, int]]) -> StateRows:
    starts = np.cumsum([0, *(count for _, count in sizes)]).astype(np.int32)
    return StateRows(
        num_tokens=int(starts[-1]),
        slots=torch.tensor([5, 0, 3, 6, 1, 2][: len(sizes)], dtype=torch.int32, device=DEVICE),
        query_start=torch.from_numpy(starts.copy()).to(DEVICE),
        seq_lens=torch.tensor([n for n, _ in sizes], dtype=torch.int32, device=DEVICE),
        query_start_cpu=starts,
        max_query_len=int(np.diff(starts).max()),
    )


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random).to(DEVICE, dtype)


def sliced(tokens: int, *shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[tokens, *shape], a part of a wider tensor as projections give it"""
    size = int(np.prod(shape))
    return draw(tokens, size + 6, dtype=dtype, seed=seed)[:, 3 : 3 + size].unflatten(-1, shape)


def check(name: str, arguments: list, state: torch.Tensor, rows: StateRows, **more: object) -> None:
    state[rows.slots[rows.begins].long()] = float("nan")
    got_state, want_state = state.clone(), state.clone()
    got = getattr(TritonStates(), name)(*arguments, got_state, rows, **more)
    want = getattr(StateOperations(), name)(*arguments, want_state, rows, **more)
    bound = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, atol=bound, rtol=bound)
    torch.testing.assert_close(got_state, want_state, atol=bound, rtol=bound)
    others = [slot for slot in range(NUM_STATES) if slot not in rows.slots.tolist()]
    assert torch.equal(got_state[others], state[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_convolution_equals_its_twin(step: str, dtype: torch.dtype) -> None:
    rows, channels = make_rows(STEPS[step]), 150
    x = sliced(rows.num_tokens, channels, dtype=dtype, seed=1)
    for kernel, bias, silu in ((4, True, True), (3, False, False)):
        weight = draw(channels, kernel, dtype=dtype, seed=2)
        shift = draw(channels, dtype=dtype, seed=3) if bias else None
        state = draw(NUM_STATES, kernel - 1, channels, dtype=dtype, seed=4)
        check("causal_conv", [x, weight, shift], state, rows, silu=silu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_ssd_scan_equals_its_twin(step: str, dtype: torch.dtype) -> None:
    rows = make_rows(STEPS[step])
    heads, groups, width, size = 4, 2, 24, 20
    tokens = rows.num_tokens
    weights = ScanWeights(-draw(heads).abs(), draw(heads), draw(heads), (0.1, 1.5))
    arguments = [
        sliced(tokens, heads, width, dtype=dtype, seed=1),
        sliced(tokens, heads, dtype=dtype, seed=2),
        sliced(tokens, groups, size, dtype=dtype, seed=3) / 4,
        sliced(tokens, groups, size, dtype=dtype, seed=4) / 4, weights,
    ]  # fmt: skip
    check("ssd_scan", arguments, draw(NUM_STATES, heads, width, size, seed=5), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_selective_scan_equals_its_twin(step: str, dtype: torch.dtype) -> None:
    rows = make_rows(STEPS[step])
    tokens, channels, size = rows.num_tokens, 40, 6
    weights = ScanWeights(-draw(channels, size).abs(), draw(channels), draw(channels))
    arguments = [
        sliced(tokens, channels, dtype=dtype, seed=1),
        sliced(tokens, channels, dtype=dtype, seed=2),
        sliced(tokens, size, dtype=dtype, seed=3), sliced(tokens, size, dtype=dtype, seed=4),
        sliced(tokens, channels, dtype=dtype, seed=6), weights,
    ]  # fmt: skip
    check("selective_scan", arguments, draw(NUM_STATES, channels, size, seed=5), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_delta_rule_equals_its_twin(step: str, dtype: torch.dtype) -> None:
    rows = make_rows(STEPS[step])
    tokens, heads, groups, keys, values = rows.num_tokens, 4, 2, 12, 20
    arguments = [
        sliced(tokens, groups, keys, dtype=dtype, seed=1),
        sliced(tokens, groups, keys, dtype=dtype, seed=2),
        sliced(tokens, heads, values, dtype=dtype, seed=3),
        sliced(tokens, heads, dtype=dtype, seed=4), sliced(tokens, heads, dtype=dtype, seed=6),
        DeltaWeights(-draw(heads).abs(), draw(heads, seed=7)),
    ]  # fmt: skip
    check("delta_rule", arguments, draw(NUM_STATES, heads, keys, values, seed=5), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_norm_equals_its_twin(gate_first: bool, dtype: torch.dtype) -> None:
    x, gate = sliced(5, 96, dtype=dtype, seed=1), sliced(5, 96, dtype=dtype, seed=2)
    for group_size, weights in ((96, 96), (24, 96), (12, 12)):
        results = [
            operations.gated_rms_norm(
                x, gate, draw(weights, dtype=dtype, seed=3), 0.1, group_size=group_size,
                gate_first=gate_first,
            )
            for operations in (TritonStates(), StateOperations())
        ]  # fmt: skip
        torch.testing.assert_close(*results, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_without_tokens_leave_states_as_they_are() -> None:
    """Recorded steps have room for more rows than a step has."""
    rows = make_rows([(4, 2), (3, 3), (0, 0), (0, 0)])
    x, weight = draw(5, 20), draw(20, 4)
    state = draw(NUM_STATES, 3, 20, seed=2)
    before = state.clone()
    out = TritonStates().causal_conv(x, weight, None, state, rows, silu=True)
    want = StateOperations().causal_conv(x, weight, None, before.clone(), rows, silu=True)
    torch.testing.assert_close(out, want)
    assert torch.equal(state[rows.slots[2:].long()], before[rows.slots[2:].long()])
