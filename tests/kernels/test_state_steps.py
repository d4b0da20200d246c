"""One token of each row through a layer with a state, in one launch, against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.state.operations import (
    ConvWeights,
    DeltaWeights,
    GatedNorm,
    Mamba2Factors,
    ScanWeights,
)
from jackfield.core.nn.state.rows import FEW_ROWS, StateRows
from jackfield.core.nn.state.sizes import DeltaSizes, Mamba2Sizes
from jackfield.kernels.state.delta_net_step import delta_net_step
from jackfield.kernels.state.head_tiles import StepConfig
from jackfield.kernels.state.mamba2_step import mamba2_step, step_config
from jackfield.plugins.conformance.states import NUM_STATES, make_rows
from jackfield.plugins.operations.states import TritonStates

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.float32, torch.bfloat16 if CUDA else torch.float16)
TOLERANCE = {torch.float32: 1e-4 if CUDA else 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
ROWS = ((1, 1), (5, 1), (40, 1))
"""(tokens of the sequence, those of the step) of each row."""


def assert_near(
    got: torch.Tensor,
    want: torch.Tensor,
    rows: StateRows,
    old: tuple[torch.Tensor, ...],
    got_states: tuple[torch.Tensor, ...],
    want_states: tuple[torch.Tensor, ...],
) -> None:
    """The results are near, and the states of `rows`; those of others are the old ones."""
    error = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, atol=error, rtol=error)
    used = rows.slots.long()
    others = [slot for slot in range(NUM_STATES) if slot not in used.tolist()]
    for before, one, other in zip(old, got_states, want_states, strict=True):
        torch.testing.assert_close(one[used], other[used], atol=error, rtol=error)
        assert torch.equal(one[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate_first", [None, True, False])
@pytest.mark.parametrize(
    ("config", "block"),
    [(StepConfig(8, 4), 1024), (StepConfig(16, 2, 2), 32), (StepConfig(4, 1, 8), 1024)],
    ids=str,
)
def test_a_program_walks_over_tiles_of_its_group(
    config: StepConfig,
    block: int,
    gate_first: bool | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of heads whose tiles, and of groups whose programs, are not full; groups are normed in one
    block, or in two."""
    monkeypatch.setattr("jackfield.kernels.state.mamba2_step.NORM_BLOCK", block)
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE, dtype)

    sizes = Mamba2Sizes(0, 6, 20, 24, 2, 4)
    _, channels, heads = sizes.projection
    numbers = [random(heads, dtype=torch.float32) for _ in range(3)]
    weights = ScanWeights(-numbers[0].abs(), numbers[1], numbers[2], (0.1, 1.5))
    conv = ConvWeights(random(channels, 4) * 0.5, random(channels))
    norm = None if gate_first is None else GatedNorm(random(sizes.inner), 0.1, gate_first)
    factors = Mamba2Factors(0.7, 1.2, 1.3)
    rows = make_rows(ROWS, DEVICE)
    old = (random(NUM_STATES, 3, channels), random(NUM_STATES, heads, 20, 24, dtype=torch.float32))
    for state in old:
        state[rows.slots[rows.begins].long()] = float("nan")
    want_states, got_states = (tuple(state.clone() for state in old) for _ in range(2))
    projected = random(rows.num_tokens, sum(sizes.projection))
    want = Operations().mamba2(
        projected, conv, weights, sizes, *want_states, rows, norm=norm, factors=factors
    )
    counters = torch.zeros(rows.num_tokens * 2, dtype=torch.int32, device=DEVICE)
    got = mamba2_step(
        projected, *conv, got_states[0], weights.a, weights.d, weights.dt_bias, weights.dt_limit,
        got_states[1], rows, counters, groups=2,
        norm=norm, factors=factors, config=config,
    )  # fmt: skip
    assert_near(got, want, rows, old, got_states, want_states)
    assert not counters.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "config", [StepConfig(8, 2), StepConfig(16, 1, 2), StepConfig(4, 1, 4)], ids=str
)
def test_a_program_walks_over_the_heads_of_its_key(config: StepConfig, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE, dtype)

    sizes = DeltaSizes(0, 2, 6, 12, 20, 4)
    channels, _, heads, _ = sizes.projection
    rate, dt_bias = (random(heads, dtype=torch.float32) for _ in range(2))
    weights = DeltaWeights(-rate.abs(), dt_bias)
    kernel, norm = random(channels, 4) * 0.5, random(20)
    rows = make_rows(ROWS, DEVICE)
    old = (random(NUM_STATES, 3, channels), random(NUM_STATES, heads, 12, 20, dtype=torch.float32))
    for state in old:
        state[rows.slots[rows.begins].long()] = float("nan")
    want_states, got_states = (tuple(state.clone() for state in old) for _ in range(2))
    projected = random(rows.num_tokens, sum(sizes.projection))
    want = Operations().delta_net(projected, kernel, weights, norm, 0.1, sizes, *want_states, rows)
    counters = torch.zeros(rows.num_tokens * 2, dtype=torch.int32, device=DEVICE)
    got = delta_net_step(
        projected, kernel, got_states[0], *weights, norm, 0.1, got_states[1],
        rows, counters, groups=2, config=config,
    )  # fmt: skip
    assert_near(got, want, rows, old, got_states, want_states)
    assert not counters.any()


def test_many_rows_of_one_token_say_what_torch_says() -> None:
    """Every other one begins its sequence."""
    draw = torch.Generator().manual_seed(0)
    count, dtype = FEW_ROWS + 3, DTYPES[1]

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE, dtype)

    sizes = Mamba2Sizes(0, 2, 16, 16, 1, 4)
    _, channels, heads = sizes.projection
    numbers = [random(heads, dtype=torch.float32) for _ in range(3)]
    weights = ScanWeights(-numbers[0].abs(), numbers[1], numbers[2], (0.1, 1.5))
    conv = ConvWeights(random(channels, 4) * 0.5, None)
    starts = torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.arange(count, dtype=torch.int32, device=DEVICE) % 2 * 6 + 1
    slots = torch.arange(count, device=DEVICE).flip(0)
    rows = StateRows(count, slots, starts.to(DEVICE), lengths, starts.numpy(), 1)
    old = (random(count, 3, channels), random(count, heads, 16, 16, dtype=torch.float32))
    for state in old:
        state[rows.slots[rows.begins]] = float("nan")
    states = [tuple(state.clone() for state in old) for _ in range(2)]
    projected = random(count, sum(sizes.projection))
    norm = GatedNorm(random(sizes.inner), 0.1, True)
    results = [
        operations.mamba2(projected, conv, weights, sizes, *each, rows, norm=norm)
        for operations, each in zip((TritonStates(), Operations()), states, strict=True)
    ]
    error = TOLERANCE[dtype]
    for got, want in [results, *zip(*states, strict=True)]:
        torch.testing.assert_close(got, want, atol=error, rtol=error)


def test_many_rows_go_through_a_delta_net_as_torch_has_it() -> None:
    """In one launch, whose programs walk over the values of a key's heads."""
    draw = torch.Generator().manual_seed(0)
    count, dtype = FEW_ROWS + 2, DTYPES[1]

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE, dtype)

    sizes = DeltaSizes(0, 1, 3, 12, 40, 4)
    channels, _, heads, _ = sizes.projection
    rate, dt_bias = (random(heads, dtype=torch.float32) for _ in range(2))
    weights = DeltaWeights(-rate.abs(), dt_bias)
    kernel, norm = random(channels, 4) * 0.5, random(40)
    starts = torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.full((count,), 7, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(count, device=DEVICE).flip(0)
    rows = StateRows(count, slots, starts.to(DEVICE), lengths, starts.numpy(), 1)
    old = (random(count, 3, channels), random(count, heads, 12, 40, dtype=torch.float32))
    states = [tuple(state.clone() for state in old) for _ in range(2)]
    projected = random(count, sum(sizes.projection))
    results = [
        operations.delta_net(projected, kernel, weights, norm, 0.1, sizes, *each, rows)
        for operations, each in zip((TritonStates(), Operations()), states, strict=True)
    ]
    error = TOLERANCE[dtype]
    for got, want in [results, *zip(*states, strict=True)]:
        torch.testing.assert_close(got, want, atol=error, rtol=error)


def test_tiles_of_a_step_fit_the_states() -> None:
    for rows in (1, 8, 64):
        for width, states in ((64, 128), (64, 256), (80, 16), (24, 512)):
            config = step_config(rows, 80, width, states)
            assert config.channels * states <= 4096 or config.channels == 1
            assert config.channels < 2 * width and config.tiles & (config.tiles - 1) == 0
