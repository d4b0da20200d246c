"""Long rows of Mamba 2's recurrence, all chunks at once, against torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.state.operations import ScanWeights
from jackfield.core.nn.state.rows import StateRows
from jackfield.kernels.state.ssd_chunks import TILES
from jackfield.kernels.state.ssd_scan import ssd_scan
from jackfield.plugins.conformance.states import NUM_STATES, make_rows

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float16
ERROR = 6e-2 if CUDA else 1e-2


def check(
    steps: tuple[tuple[int, int], ...],
    heads: int,
    groups: int,
    width: int,
    size: int,
    factor: float = 1.0,
    **options: Any,
) -> None:
    """factor: of the tolerance; steps: (tokens of the sequence, those of the step) of each row."""
    torch.manual_seed(3)
    rows: StateRows = make_rows(steps, DEVICE)
    tokens = rows.num_tokens
    wide = torch.randn(tokens, heads * width + 2 * groups * size + heads + 3).to(DEVICE, DTYPE)
    x, b, c, dt = (
        part.unflatten(-1, shape) for part, shape in zip(
            wide[:, 3:].split([heads * width, groups * size, groups * size, heads], -1),
            ((heads, width), (groups, size), (groups, size), (heads,)), strict=True,
        )
    )  # fmt: skip
    b, c = b * size**-0.5, c * 1.0
    vectors = torch.randn(3, heads, device=DEVICE)
    weights = ScanWeights(-vectors[0].exp() / 8, vectors[1], vectors[2], dt_limit=(0.01, 2.0))
    state = torch.randn(NUM_STATES, heads, width, size, device=DEVICE)
    state[rows.slots[rows.begins].long()] = float("nan")
    want_state, got_state = state.clone(), state.clone()
    want = Operations().ssd_scan(x, dt, b, c, weights, want_state, rows)
    got = ssd_scan(x, dt, b, c, weights, got_state, rows, **options)
    torch.testing.assert_close(got, want, atol=factor * ERROR, rtol=factor * ERROR)
    used = sorted(set(rows.slots.tolist()))
    torch.testing.assert_close(
        got_state[used], want_state[used], atol=factor * ERROR, rtol=factor * ERROR
    )
    others = [slot for slot in range(NUM_STATES) if slot not in used]
    assert torch.equal(got_state[others], state[others])


@pytest.mark.parametrize(
    ("steps", "width"),
    [
        (((70, 70),), 8),
        (((90, 33), (9, 1), (32, 32), (64, 64)), 8),
        (((21, 21), (31, 12), (3, 3)), 70),
        (((33, 33), (5, 1), (129, 97), (0, 0)), 8),
    ],
    ids=str,
)
def test_long_rows_equal_their_twin(steps: tuple[tuple[int, int], ...], width: int) -> None:
    """Rows of just one chunk, of its number of tokens and one more, beside decode rows; two heads
    per program of outputs."""
    steps = tuple(step for step in steps if step[1])
    tiles = TILES._replace(chunk=32, columns=16, programs=1)
    check(steps, 4, 2, width, 24, long=20, tiles=tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [128, 256])
def test_published_sizes_on_a_gpu(size: int) -> None:
    """Of 17 million results, 4 were up to 0.1 apart."""
    steps = ((900, 900), (1, 1), (700, 257), (300, 256), (5000, 4000))
    check(steps, 48, 1, 64, size, factor=2.0, long=64)
