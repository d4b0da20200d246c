"""Choosing the tokens that stay in a compaction, against its twin in torch."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.nn.operations import Operations
from jackfield.plugins.operations.triton import TritonOperations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cases(num_tokens: int) -> torch.Tensor:
    """Scores of all kinds, [5 layers, 2 heads, num_tokens]."""
    draw = torch.Generator().manual_seed(num_tokens)
    scores = torch.randn(5, 2, num_tokens, generator=draw)
    scores[1] = scores[1].round()  # Many equal ones, and zeros of both signs.
    scores[2, 0] = -torch.inf
    scores[2, 1, : num_tokens // 2] = torch.inf
    scores[3, 0] = torch.arange(num_tokens)
    scores[3, 1] *= 1e-40  # Subnormal numbers.
    # Many equal ones, which differ from others in their last bits alone.
    for head, highest in enumerate((9, 10)):
        last_bits = torch.randint(0, highest + 1, (num_tokens,), generator=draw)
        last_bits[::50], last_bits[1::50] = 11, 10
        scores[4, head] = (0x3F800000 + last_bits).to(torch.int32).view(torch.float32)
    return scores


@pytest.mark.parametrize(("num_tokens", "num_kept"), [(1, 1), (5000, 300), (4096, 4095), (70, 70)])
def test_it_equals_its_twin(num_tokens: int, num_kept: int) -> None:
    scores = cases(num_tokens).to(DEVICE)
    wider = torch.full((5, num_kept + 3, 2), -1, dtype=torch.int32, device=DEVICE)
    expected = wider.clone()
    Operations().best_tokens(scores, expected[:, 2:-1])
    TritonOperations().best_tokens(scores, wider[:, 2:-1])
    assert torch.equal(wider, expected)


def test_the_best_tokens_stay_in_order_and_the_earlier_of_equals() -> None:
    scores = torch.tensor([[[1.0, 3.0, 1.0, 2.0], [5.0, 5.0, 5.0, 9.0]]], device=DEVICE)
    for operations in (Operations(), TritonOperations()):
        out = torch.empty(1, 3, 2, dtype=torch.int32, device=DEVICE)
        operations.best_tokens(scores, out)
        assert out[0].T.tolist() == [[0, 1, 3], [0, 1, 3]]
