"""Embeddings, whole, divided and quantized: their rows, a factor, and the rows of positions."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from torch import nn

from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.embedding import Embedding
from jackfield.core.nn.operations import Operations, PositionRows
from jackfield.core.nn.quantized import QuantizedEmbedding
from jackfield.core.parallel.ranks import ONE_RANK, Ranks

TOKENS, SIZE = 40, 16
TABLE = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(0))
PLACES = torch.randn(9, SIZE, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """As much of a `QuantizedLinear` as an embedding calls."""

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return TABLE[token_ids]


class Group:
    """Of two ranks, as the first sees it: the second has the other rows."""

    rank, size = 0, 2

    def __init__(self, token_ids: torch.Tensor) -> None:
        self.others = TABLE[token_ids] * (token_ids >= TOKENS // 2)[:, None]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.others


def made(kind: str, token_ids: torch.Tensor) -> nn.Module:
    if kind == "quantized":
        return QuantizedEmbedding(Layer())  # type: ignore[arg-type]
    ranks = Ranks(tensor=cast(Any, Group(token_ids))) if kind == "divided" else ONE_RANK
    build = BuildContext(torch.device("cpu"), torch.float32, Operations(), ranks=ranks)
    embedding = Embedding(TOKENS, SIZE, build, shard="vocabulary")
    embedding.weight.data.copy_(TABLE[: len(embedding.weight)])
    return embedding


@pytest.mark.parametrize("kind", ["whole", "divided", "quantized"])
@torch.inference_mode()
def test_rows_are_scaled_before_those_of_positions_are_added(kind: str) -> None:
    token_ids = torch.tensor([3, 39, 20, 3, 19])
    rows = PositionRows(torch.tensor([0, 8, 2, 2, 7]), PLACES)
    embedding = made(kind, token_ids)
    for factor, positions in itertools.product((1.0, 2.5), (None, rows)):
        want = factor * TABLE[token_ids]
        if positions is not None:
            want = want + PLACES[positions.positions]
        torch.testing.assert_close(embedding(token_ids, factor=factor, positions=positions), want)
