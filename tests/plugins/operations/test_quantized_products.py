"""Products by 4-bit weights, whatever number of tokens decides about, against plain torch."""

from __future__ import annotations

import pytest
import torch

from jackfield.core.nn.operations import Norm, Operations
from jackfield.core.nn.quantized_weight import QuantizedWeight, round_to_words
from jackfield.plugins.operations.triton import TritonOperations

pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter's products of bfloat16 are wrong.
DTYPE = torch.bfloat16 if CUDA else torch.float16
SIZE = 256


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)


@pytest.mark.parametrize("tokens", [1, 3, 130])
@pytest.mark.parametrize("after", ["gated", "residual", "sorted"])
@pytest.mark.parametrize("group", [64, 8], ids=["4 bits", "groups too narrow for the tensor core"])
def test_products_by_4_bits_equal_plain_ones(tokens: int, after: str, group: int) -> None:
    words, scale = round_to_words(draw(96, SIZE) / SIZE**0.5, 4, group)
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight = QuantizedWeight(
        words, scale, group, bits=4, order=order if after == "sorted" else None
    )
    x, bias = draw(tokens, SIZE, seed=2), draw(96, seed=3)
    norm = Norm(draw(SIZE, seed=4) / 4 + 1, 1e-6)
    stream = draw(tokens, 96, seed=5)
    results = []
    for operations in (Operations(), TritonOperations()):
        results.append(
            operations.quantized_linear(
                x, weight, bias, norm=norm, gated=after == "gated",
                residual=stream.clone() if after == "residual" else None,
            )
        )  # fmt: skip
    expected, actual = results
    assert actual.dtype == DTYPE
    tolerance = 8e-2 if CUDA else 1.2e-2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_what_is_large_before_its_norm_stays_finite_in_float16() -> None:
    words, scale = round_to_words(draw(32, SIZE).half() / SIZE**0.5, 4, 64)
    weight = QuantizedWeight(words, scale, 64, bits=4)
    x = (draw(1, SIZE, seed=2) * 1000).half()
    norm = Norm(torch.full((SIZE,), 100.0, device=DEVICE, dtype=torch.float16), 1e-6)
    expected = Operations().quantized_linear(x, weight, norm=norm)
    actual = TritonOperations().quantized_linear(x, weight, norm=norm)
    torch.testing.assert_close(actual, expected, atol=0.5, rtol=1e-2)
