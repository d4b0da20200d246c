"""`uniform_matmul` against torch, and rows against those in other batches: the same bits."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from jackfield.kernels.linear.small_m_matmul import MAX_TILES, SplitKWorkspace
from jackfield.kernels.linear.uniform_matmul import (
    FEW_ROWS,
    UniformConfig,
    uniform_config,
    uniform_matmul,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SMALL = UniformConfig(16, 32, 16, 3, 4, 2)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)


def workspace() -> SplitKWorkspace:
    return SplitKWorkspace(
        torch.full((1 << 18,), float("nan"), device=DEVICE),
        torch.zeros(MAX_TILES, dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 70, 96), (33, 64, 100), (150, 32, 48)])
def test_it_is_the_product(rows: int, outputs: int, width: int, gated: bool) -> None:
    """With sizes that no tile divides, a bias, and a residual in place."""
    x, weight = draw(rows, width), draw(outputs * (1 + gated), width, seed=1) * width**-0.5
    bias, residual = draw(len(weight), seed=2), None if gated else draw(rows, outputs, seed=3)
    product = x.float() @ weight.float().t() + bias.float()
    if gated:
        gate, up = product.chunk(2, dim=-1)
        want = torch.nn.functional.silu(gate) * up
    else:
        assert residual is not None
        want = product + residual.float()
    room = workspace()
    out = uniform_matmul(
        x, weight, bias, residual=residual, gated=gated, config=SMALL, workspace=room, out=residual
    )
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)
    assert not room.counters.any(), "counters are zero again"


@pytest.mark.parametrize("gated", [False, True])
def test_parts_are_added_in_one_order(gated: bool) -> None:
    """By programs of their own where rows are few, or by one; wherever a row is."""
    x, weight = draw(FEW_ROWS + 40, 200), draw(80, 200, seed=1)
    whole = uniform_matmul(x, weight, gated=gated, config=SMALL, workspace=workspace())
    for rows in ([0], [5, 3], list(range(60, 10, -1)), [99] * 20):
        for room in (None, workspace()):
            got = uniform_matmul(x[rows], weight, gated=gated, config=SMALL, workspace=room)
            assert torch.equal(got, whole[rows]), f"{len(rows)} rows"


def test_sizes_of_a_model_have_parts_where_weights_are_narrow() -> None:
    for shape, gated, parts in (
        ((4096, 4096), False, 4), ((6144, 4096), False, 4), ((4096, 12288), False, 4),
        ((24576, 4096), True, 1), ((151936, 4096), False, 1), ((1024, 1024), False, 1),
    ):  # fmt: skip
        weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        assert uniform_config(weight, gated).parts == parts, shape
