"""The pointwise kernels against their torch twins."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.kernels import reference
from jackfield.kernels.rms_norm import fused_add_rms_norm, rms_norm
from jackfield.kernels.rotary import rotary
from jackfield.kernels.silu_mul import silu_mul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One unit in the last place of values up to 4, where sums in another order fall on a border.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 96, 1000])
def test_rms_norm_equals_its_twin(dtype, size):
    x, weight = draw(5, size, dtype=dtype), draw(size, dtype=dtype)
    close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_rms_norm_of_heads_in_a_fused_projection():
    fused = draw(3, 200, dtype=torch.float32)
    heads, weight = fused[:, 8:72].unflatten(1, (4, 16)).contiguous(), draw(16, dtype=fused.dtype)
    close(rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
    sliced = fused[:, :64]
    close(
        rms_norm(sliced, weight.repeat(4), 1e-5), reference.rms_norm(sliced, weight.repeat(4), 1e-5)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 500])
def test_fused_add_rms_norm_equals_its_twin(dtype, size):
    x, residual = draw(4, size, dtype=dtype), draw(4, size, dtype=dtype) * 0.5
    weight = draw(size, dtype=dtype)
    want_x, want_residual = x.clone(), residual.clone()
    reference.fused_add_rms_norm(want_x, want_residual, weight, 1e-5)
    fused_add_rms_norm(x, residual, weight, 1e-5)
    close(x, want_x)
    close(residual, want_residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 1500])
def test_silu_mul_equals_its_twin(dtype, size):
    x = draw(3, 2 * size, dtype=dtype) * 3
    close(silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"), [(6, 2, 80, 80), (4, 1, 64, 32)]
)
def test_rotary_equals_its_twin_in_place(dtype, heads, kv_heads, dim, rotary_dim):
    fused = draw(5, (heads + kv_heads) * dim, dtype=dtype)
    angles = torch.rand(50, rotary_dim // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([3, 0, 49, 3, 11], device=DEVICE)
    twin = fused.clone()

    def views(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = tensor.split((heads * dim, kv_heads * dim), dim=1)
        return query.view(5, heads, dim), key.view(5, kv_heads, dim)

    before = fused.clone()
    rotary(*views(fused), positions, cos_sin)
    reference.rotary(*views(twin), positions, cos_sin)
    close(fused, twin)
    assert not fused.equal(before)


def test_rotary_turns_each_pair_by_its_angle():
    query = torch.tensor([[[1.0, 0.0]]], device=DEVICE)
    key = torch.tensor([[[0.0, 1.0]]], device=DEVICE)
    quarter = torch.tensor([[0.0, 1.0]], device=DEVICE)  # cosine 0, sine 1
    rotary(query, key, torch.tensor([0], device=DEVICE), quarter)
    assert query.flatten().tolist() == [0.0, 1.0]
    assert key.flatten().tolist() == [-1.0, 0.0]
