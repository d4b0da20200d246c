"""Products of few tokens against torch, and the choices of their tiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from jackfield.kernels.linear.int4_gemv import Int4GemvConfig
from jackfield.kernels.linear.small_m_matmul import (
    MAX_TILES,
    SmallMConfig,
    SplitKWorkspace,
    small_m_matmul,
    split_k_floats,
)
from jackfield.kernels.tuning import (
    CONFIGS,
    FOLDER,
    Product,
    int4_gemv_config,
    int4_small_m_config,
    read,
    small_m_config,
    small_m_rule,
)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float16
CONFIG = SmallMConfig(16, 32, 32, 1, 4, 3, 1024, True)


def workspace(size: int = 1 << 16) -> SplitKWorkspace:
    return SplitKWorkspace(
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
    expected = reference(x, weight, bias, residual, gated)
    config = CONFIG._replace(split_k=split)
    actual = small_m_matmul(
        x, weight, bias, residual=residual, gated=gated, config=config, workspace=room
    )
    assert torch.allclose(actual.double(), expected, rtol=2e-2, atol=2e-2)
    assert not room.counters.any(), "the counters are to be zeros again"


def test_the_result_may_replace_the_residual() -> None:
    x = torch.randn(5, 64, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(48, 64, device=DEVICE, dtype=DTYPE) * 0.1
    residual = torch.randn(5, 48, device=DEVICE, dtype=DTYPE)
    expected = reference(x, weight, None, residual, False)
    actual = small_m_matmul(x, weight, residual=residual, config=CONFIG, out=residual)
    assert actual is residual
    assert torch.allclose(actual.double(), expected, rtol=2e-2, atol=2e-2)


def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    x = torch.randn(16, 128, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(64, 128, device=DEVICE, dtype=DTYPE)
    config = CONFIG._replace(split_k=2)
    whole = small_m_matmul(x, weight, config=config, workspace=workspace())
    part = small_m_matmul(x[:3], weight, config=config, workspace=workspace())
    assert torch.equal(whole[:3], part)


def test_a_share_without_room_is_refused() -> None:
    x, weight = torch.randn(4, 64, device=DEVICE), torch.randn(32, 64, device=DEVICE)
    config = CONFIG._replace(split_k=2)
    with pytest.raises(ValueError, match="workspace of 256 floats"):
        small_m_matmul(
            x, weight, config=config, workspace=workspace(split_k_floats(4, 32, 2, False) - 1)
        )
    with pytest.raises(ValueError, match="gated"):
        small_m_matmul(x, weight, residual=x, gated=True, config=CONFIG)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_of_choices_can_be_read_and_says_what_was_measured(path: Path) -> None:
    page = json.loads(path.read_text())
    assert page["device"].replace(" ", "_") == path.stem
    assert page["commit"] and page["triton"] and page["torch"]
    assert page["measured"]
    for kernel in CONFIGS:
        choices = read(path, kernel)
        assert bool(choices) == (kernel in page["measured"])
        if not choices:
            continue
        assert page["measured"][kernel]["commit"]
        for entry in page[kernel]:
            if "rule_us" in entry:  # Measured between the other products of its layer.
                tuned = entry["layer_us"] if "layer_us" in entry else entry["vocabulary_us"]
                faster = tuned < entry["rule_us"]
            else:  # Of 4 bits with few rows, unpacking was not tried.
                faster = entry["us"] < entry.get("library_us", float("inf"))
            assert faster == (entry["config"] is not None), entry
            configs = dict(choices[Product(entry["outputs"], entry["inputs"], entry["gated"])])
            assert (configs[entry["rows"]] is not None) == faster


def test_weights_that_were_not_measured_go_by_the_rule_for_few_rows() -> None:
    wide, narrow = Product(14336, 4096, True), Product(2048, 2048, False)
    assert small_m_rule(wide, 8) == SmallMConfig(16, 64, 128, 1, 4, 4, 0, True)
    assert small_m_rule(narrow, 20) == SmallMConfig(32, 64, 64, 4, 4, 6, 4096, True)
    assert small_m_rule(wide, 33) is None
    assert small_m_rule(Product(151936, 4096, False), 8) is None
    assert small_m_config(wide, 8, torch.device("cpu")) is None, "no file for a CPU"


def test_4_bits_go_by_a_rule_everywhere_up_to_so_many_rows() -> None:
    cpu = torch.device("cpu")
    wide, long = Product(12288, 4096, True), Product(4096, 12288, False)
    assert int4_gemv_config(wide, cpu) == Int4GemvConfig(32, 4, 4)
    assert int4_gemv_config(long, cpu) == Int4GemvConfig(128, 2, 3)
    assert int4_small_m_config(wide, 2, cpu) == SmallMConfig(8, 64, 64, 1, 4, 3)
    assert int4_small_m_config(long, 33, cpu) == SmallMConfig(64, 128, 32, 4, 8, 3)
    assert int4_small_m_config(long, 128, cpu) == SmallMConfig(128, 128, 32, 4, 8, 2)
    assert int4_small_m_config(long, 129, cpu) is None
