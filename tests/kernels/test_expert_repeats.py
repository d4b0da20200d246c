"""Products by experts give the same bits each time, with all tiles in use.

Triton 3.6 lets the tensor core read a loop iteration's numbers from registers while the next
iteration writes them. Eight warps of fp8 in groups showed it in most of 60 runs; no tiles in use
do. See docs/benchmarks/journal.md.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from jackfield.core.nn.quantized_weight import QuantizedWeight
from jackfield.kernels.moe.expert_matmul import expert_matmul
from jackfield.kernels.moe.sort_tokens import sort_tokens
from jackfield.kernels.quant.quantized_weight import Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_EXPERTS, TOP_K, OUTPUTS, SIZE = 16, 8, 2048, 768
RUNS = 60
FORMATS = [  # kind, columns per group, rows per scale, type of scales
    ("bfloat16", SIZE, 1, torch.float32),
    ("fp8", SIZE, 1, torch.float32),
    ("fp8", 128, 16, torch.float32),
    ("fp8", 32, 1, torch.bfloat16),
    ("words4", 128, 1, torch.float32),
    ("words4", 128, 1, torch.bfloat16),
    ("zeros4", 128, 1, torch.bfloat16),
    ("zeros4", 32, 1, torch.float32),
    ("e2m1", 32, 1, torch.bfloat16),
    ("e2m1", 16, 1, torch.float32),
]


def random_weight(kind: str, group: int, scale_rows: int, scale_dtype: torch.dtype) -> Weight:
    rows = NUM_EXPERTS * OUTPUTS
    if kind == "bfloat16":
        return torch.randn(rows, SIZE, device="cuda", dtype=torch.bfloat16)
    groups, zero, bits = SIZE // group, None, 8
    if kind == "fp8":
        values = (torch.randn(rows, SIZE, device="cuda") * 64).to(torch.float8_e4m3fn)
    else:
        bits = 4
        values = torch.randint(-(2**31), 2**31, (rows, SIZE // 8), device="cuda", dtype=torch.int32)
    if kind == "zeros4":
        zero = torch.randint(0, 16, (groups, rows), device="cuda", dtype=torch.uint8)
    scale = (torch.rand(groups, rows // scale_rows, device="cuda") + 0.5) / 64 / SIZE**0.5
    run = group if kind == "e2m1" else None
    return QuantizedWeight(values, scale.to(scale_dtype), group, zero, scale_rows, bits, run)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("num_tokens", [12, 24, 60, 700])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f[0]}-{f[1]}-{f[3]}")
def test_products_by_experts_are_the_same_each_time(
    format: tuple[str, int, int, torch.dtype], num_tokens: int, gated: bool
) -> None:
    """Numbers of tokens: one for each size of tiles."""
    torch.manual_seed(num_tokens)
    choices = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(TOP_K).indices.int()
    lists = sort_tokens(choices, NUM_EXPERTS)
    rows = num_tokens if gated else num_tokens * TOP_K
    x = torch.randn(rows, SIZE, device="cuda", dtype=torch.bfloat16)
    weight = random_weight(*format)

    def product() -> torch.Tensor:
        return expert_matmul(x, *lists, weight, top_k=TOP_K, gated=gated)

    first = product()
    assert sum(not torch.equal(first, product()) for _ in range(RUNS)) == 0
