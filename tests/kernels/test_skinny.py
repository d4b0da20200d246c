"""Products of few tokens against torch, and the choices of how to cut them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from jackfield.kernels.nibble_gemv import NibbleGemvShape
from jackfield.kernels.nibble_skinny import NibbleSkinnyShape
from jackfield.kernels.skinny import MAX_TILES, SkinnyShape, SkinnyWorkspace, elements, skinny
from jackfield.kernels.tuning import (
    FOLDER,
    SHAPES,
    Product,
    nibble_gemv_shape,
    nibble_skinny_shape,
    read,
    skinny_rule,
    skinny_shape,
)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float16
SHAPE = SkinnyShape(16, 32, 32, 1, 4, 3, 1024, True)


def workspace(size: int = 1 << 16) -> SkinnyWorkspace:
    return SkinnyWorkspace(
        torch.full((size,), float("nan"), device=DEVICE),
        torch.zeros(MAX_TILES, dtype=torch.int32, device=DEVICE),
    )


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> torch.Tensor:
    out = x.double() @ weight.double().T
    if bias is not None:
        out += bias.double()
    if gated:
        gate, up = out.chunk(2, dim=1)
        out = torch.nn.functional.silu(gate) * up
    return out if residual is None else out + residual.double()


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(2, 64, 256), (17, 70, 128), (16, 96, 150), (40, 33, 70), (3, 32, 32)],
)
def test_a_product_equals_torch(
    rows: int, outputs: int, inputs: int, gated: bool, split: int
) -> None:
    torch.manual_seed(rows + split)
    room = workspace()
    stacked = outputs * (2 if gated else 1)
    x = torch.randn(rows, inputs, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(stacked, inputs, device=DEVICE, dtype=DTYPE) * 0.1
    bias = torch.randn(stacked, device=DEVICE, dtype=DTYPE)
    residual = None if gated else torch.randn(rows, outputs, device=DEVICE, dtype=DTYPE)
    wanted = reference(x, weight, bias, residual, gated)
    shape = SHAPE._replace(split=split)
    got = skinny(x, weight, bias, residual=residual, gated=gated, shape=shape, workspace=room)
    assert torch.allclose(got.double(), wanted, rtol=2e-2, atol=2e-2)
    assert not room.counters.any(), "the counters are to be zeros again"


def test_the_result_may_replace_the_residual() -> None:
    x = torch.randn(5, 64, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(48, 64, device=DEVICE, dtype=DTYPE) * 0.1
    residual = torch.randn(5, 48, device=DEVICE, dtype=DTYPE)
    wanted = reference(x, weight, None, residual, False)
    got = skinny(x, weight, residual=residual, shape=SHAPE, out=residual)
    assert got is residual
    assert torch.allclose(got.double(), wanted, rtol=2e-2, atol=2e-2)


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    x = torch.randn(16, 128, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(64, 128, device=DEVICE, dtype=DTYPE)
    shape = SHAPE._replace(split=2)
    whole = skinny(x, weight, shape=shape, workspace=workspace())
    part = skinny(x[:3], weight, shape=shape, workspace=workspace())
    assert torch.equal(whole[:3], part)


def test_a_share_without_room_is_refused() -> None:
    x, weight = torch.randn(4, 64, device=DEVICE), torch.randn(32, 64, device=DEVICE)
    shape = SHAPE._replace(split=2)
    with pytest.raises(ValueError, match="workspace of 256 floats"):
        skinny(x, weight, shape=shape, workspace=workspace(elements(4, 32, 2, False) - 1))
    with pytest.raises(ValueError, match="gated"):
        skinny(x, weight, residual=x, gated=True, shape=SHAPE)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_of_choices_can_be_read_and_says_what_was_measured(path: Path) -> None:
    page = json.loads(path.read_text())
    assert page["device"].replace(" ", "_") == path.stem
    assert page["commit"] and page["triton"] and page["torch"]
    for kernel in SHAPES:
        choices = read(path, kernel)
        assert choices
        assert page["measured"][kernel]["commit"]
        for entry in page[kernel]:
            # Of 4 bits with few rows, unpacking was not tried.
            faster = entry["us"] < entry.get("library_us", float("inf"))
            assert faster == (entry["shape"] is not None), entry
            shape = dict(choices[Product(entry["outputs"], entry["inputs"], entry["gated"])])
            assert (shape[entry["rows"]] is not None) == faster


def test_weights_that_were_not_measured_go_by_the_rule_for_few_rows() -> None:
    wide, narrow = Product(14336, 4096, True), Product(2048, 2048, False)
    assert skinny_rule(wide, 8) == SkinnyShape(16, 64, 128, 1, 4, 4, 0, True)
    assert skinny_rule(narrow, 20) == SkinnyShape(32, 64, 64, 4, 4, 6, 4096, True)
    assert skinny_rule(wide, 33) is None
    assert skinny_rule(Product(151936, 4096, False), 8) is None
    assert skinny_shape(wide, 8, torch.device("cpu")) is None, "no file for a CPU"


def test_4_bits_go_by_a_rule_everywhere_up_to_so_many_rows() -> None:
    cpu = torch.device("cpu")
    wide, long = Product(12288, 4096, True), Product(4096, 12288, False)
    assert nibble_gemv_shape(wide, cpu) == NibbleGemvShape(32, 4, 4)
    assert nibble_gemv_shape(long, cpu) == NibbleGemvShape(128, 2, 3)
    assert nibble_skinny_shape(wide, 2, cpu) == NibbleSkinnyShape(8, 64, 64, 1, 4, 3)
    assert nibble_skinny_shape(long, 33, cpu) == NibbleSkinnyShape(64, 128, 32, 4, 8, 3)
    assert nibble_skinny_shape(long, 128, cpu) == NibbleSkinnyShape(128, 128, 32, 4, 8, 2)
    assert nibble_skinny_shape(long, 129, cpu) is None
