"""Kernels of Kimi delta attention and lightning attention, against torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.state.operations import ChannelDeltaWeights, ScanWeights
from jackfield.core.nn.state.rows import StateRows
from jackfield.plugins.conformance.states import NUM_STATES, make_rows
from jackfield.plugins.operations.states import TritonStates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if DEVICE.type == "cuda" else ()))
"""The interpreter's products of bfloat16 are wrong."""
STEPS = {
    "decode": ((5, 1), (1, 1), (9, 1)),
    "prompts": ((15, 15), (41, 37), (1, 1), (2, 2), (50, 1)),
}
"""(tokens of the sequence, those of the step) of each row."""


def compare(name: str, inputs: Sequence[Any], weights: Any, shape: tuple[int, ...],
            rows: StateRows, dtype: torch.dtype) -> None:  # fmt: skip
    """Results and states of kernels and of torch are near; others' states are kept."""
    state = torch.randn(NUM_STATES, *shape, device=DEVICE)
    state[rows.slots[rows.begins].long()] = float("nan")
    states = state.clone(), state.clone()
    want, got = (
        getattr(operations, name)(*inputs, weights, each, rows)
        for operations, each in zip((Operations(), TritonStates()), states, strict=True)
    )
    error = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, atol=error, rtol=error)
    used = sorted(set(rows.slots.tolist()))
    torch.testing.assert_close(states[1][used], states[0][used], atol=error, rtol=error)
    others = [slot for slot in range(NUM_STATES) if slot not in used]
    assert torch.equal(states[1][others], state[others])


def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize(("bound", "strength"), [(None, 1.0), (-5.0, 2.0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_each_channel_decays_by_its_number(
    step: str, dtype: torch.dtype, bound: float | None, strength: float
) -> None:
    """Inputs are views of wider projections."""
    heads, size, width = 2, 24, 20
    rows = make_rows(STEPS[step], DEVICE)
    tokens = rows.num_tokens
    qk = draw(dtype, tokens, 2 * heads * size + 5)
    q, k = (qk[:, n * heads * size :][:, : heads * size].view(tokens, heads, size) for n in (0, 1))
    rest = [draw(dtype, tokens, heads, width), draw(dtype, tokens, heads, size)]
    beta = draw(dtype, tokens, heads + 3)[:, 1 : 1 + heads]
    bias = draw(torch.float32, heads, size)
    weights = ChannelDeltaWeights(-draw(torch.float32, heads).abs(), bias, bound, strength)
    compare("channel_delta_rule", [q, k, *rest, beta], weights, (heads, size, width), rows, dtype)


@pytest.mark.parametrize(
    ("rate", "bound", "strength"), [(1e-3, None, 1.0), (2.0, -5.0, 1.0), (30.0, None, 2.0)]
)
def test_chunks_decay_by_channels(rate: float, bound: float | None, strength: float) -> None:
    """From nearly no decay, with keys that are alike, to one that leaves nothing of a token."""
    dtype, heads, size, width = DTYPES[-1], 2, 24, 20
    rows = make_rows(((70, 66), (1, 1), (17, 17), (9, 2)), DEVICE)
    tokens = rows.num_tokens
    q, k, step = (draw(dtype, tokens, heads, size) for _ in range(3))
    v, beta = draw(dtype, tokens, heads, width), draw(dtype, tokens, heads)
    if rate < 1:
        k = k * 0.1 + k[:1]
    rates = -rate * (1 + torch.rand(heads, device=DEVICE))
    weights = ChannelDeltaWeights(rates, draw(torch.float32, heads, size), bound, strength)
    compare("channel_delta_rule", [q, k, v, step, beta], weights, (heads, size, width), rows, dtype)


@pytest.mark.gpu
def test_published_sizes_on_a_gpu() -> None:
    """Kimi Linear's heads, in chunks."""
    dtype, heads, size = torch.bfloat16, 32, 128
    rows = make_rows(((900, 900), (1, 1), (700, 257), (300, 256)), DEVICE)
    tokens = rows.num_tokens
    q, k, v, step = (draw(dtype, tokens, heads, size) for _ in range(4))
    weights = ChannelDeltaWeights(
        -torch.rand(heads, device=DEVICE) * 16, draw(torch.float32, heads, size) - 3
    )
    inputs = [q, k, v, step, draw(dtype, tokens, heads)]
    compare("channel_delta_rule", inputs, weights, (heads, size, size), rows, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_lightning_attention_is_a_scan_with_steps_of_one(step: str, dtype: torch.dtype) -> None:
    """One row of step sizes is shared by all tokens; slopes from nearly nothing on."""
    heads, size = 3, 16
    rows = make_rows(STEPS[step], DEVICE)
    qkv = draw(dtype, rows.num_tokens, 3, heads, size) * 0.3
    query, key, value = qkv.unbind(1)
    slopes, zeros = torch.tensor([1e-5, 0.1, 0.9]).to(DEVICE), torch.zeros(heads, device=DEVICE)
    weights = ScanWeights(-slopes, zeros, zeros, dt_limit=(1.0, 1.0))
    dt = zeros[None].expand(rows.num_tokens, -1)
    compare("ssd_scan", [value, dt, key, query], weights, (heads, size, size), rows, dtype)
    y = Operations().ssd_scan(
        *(part[:2].float() for part in (value, dt, key, query)), weights,
        torch.zeros(1, heads, size, size, device=DEVICE), make_one_row(),
    )  # fmt: skip
    q, k, v = (part[:2].float() for part in (query, key, value))
    kept = torch.exp(-slopes)[:, None] * torch.einsum("hd,hd->h", q[1], k[0])[:, None] * v[0]
    seen = torch.einsum("hd,hd->h", q[1], k[1])[:, None] * v[1]
    torch.testing.assert_close(y[1], kept + seen, atol=1e-5, rtol=1e-5)


def make_one_row() -> StateRows:
    rows = make_rows(((2, 2),), DEVICE)
    rows.slots.zero_()
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_may_be_gated_by_sigmoids(dtype: torch.dtype) -> None:
    x, gate = draw(dtype, 5, 40), draw(dtype, 5, 46)[:, 3:43]
    weight = draw(dtype, 20)
    options: dict[str, Any] = {"group_size": 20, "gate_first": False, "sigmoid": True}
    want = Operations().gated_rms_norm(x.float(), gate.float(), weight.float(), 0.1, **options)
    got = TritonStates().gated_rms_norm(x, gate, weight, 0.1, **options)
    torch.testing.assert_close(
        got.float(), want, atol=TOLERANCE[dtype] / 4, rtol=TOLERANCE[dtype] / 4
    )
