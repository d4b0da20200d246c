"""Moving the tokens that stay in a compaction, against its twin in torch."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.cache.formats import QUANTIZED_FORMATS
from jackfield.core.nn.kv_cache.quantized_cache import QuantizedCache, token_parts
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.step_operations.compaction import CacheMoves
from jackfield.kernels.compaction import compact_caches as compaction
from jackfield.plugins.operations.triton import TritonOperations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, HEADS = 8, 2
LENGTHS, COUNTS = (70, 9, 16), (50, 9, 3)
"""Tokens in three caches: more than a program moves at a time; all stay; within a block."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the longest cache takes several programs, and a loop of one in place."""
    monkeypatch.setattr(compaction, "MAX_TOKENS", 16)


def caches_and_moves(
    in_place: bool, dims: tuple[int, ...]
) -> tuple[list[torch.Tensor], CacheMoves]:
    draw = torch.Generator().manual_seed(1)
    columns = 9
    order = torch.randperm(6 * columns, generator=draw) + 1
    table = order[: 3 * columns].view(3, columns).int()
    fresh = order[3 * columns :].view(3, columns).int()
    chosen = torch.cat([
        torch.rand(len(dims), length, HEADS, generator=draw).argsort(1)[:, :count].sort(1)[0]
        for length, count in zip(LENGTHS, COUNTS, strict=True)
    ], dim=1)  # fmt: skip
    slots = torch.tensor([2, 0, 1], dtype=torch.int32)
    targets = table[slots.long()] if in_place else fresh
    starts = torch.tensor([0, *COUNTS]).cumsum(0).int()
    parts = (slots, starts, chosen.int(), table, targets)
    moves = CacheMoves(*(part.to(DEVICE) for part in parts), COUNTS)
    caches = [torch.randn(2, 60, SIZE, HEADS, dim, generator=draw).to(DEVICE) for dim in dims]
    return caches, moves


@pytest.mark.parametrize("dims", [(16, 16), (24, 16)], ids=["alike", "of two shapes"])
@pytest.mark.parametrize("in_place", [False, True])
def test_it_equals_its_twin(in_place: bool, dims: tuple[int, ...]) -> None:
    caches, moves = caches_and_moves(in_place, dims)
    before, expected = [each.clone() for each in caches], [each.clone() for each in caches]
    Operations().compact_caches(expected, moves)
    TritonOperations().compact_caches(caches, moves)
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(got, want)
    # By definition, for one token of a long request: the 45th of its second head, in layer 1.
    slot, place, head = 2, 44, 1
    source = int(moves.chosen[1, place, head])
    old = before[1][:, int(moves.block_table[slot, source // SIZE]), source % SIZE, head]
    new = caches[1][:, int(moves.targets[0, place // SIZE]), place % SIZE, head]
    assert torch.equal(new, old)
    if not in_place:
        read = moves.block_table.flatten().long()
        assert torch.equal(caches[0][:, read], before[0][:, read]), "sources are only read"


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
@pytest.mark.parametrize("in_place", [False, True])
def test_codes_and_words_move_as_they_are(in_place: bool, name: str) -> None:
    _, moves = caches_and_moves(in_place, (16, 16))
    draw = torch.Generator().manual_seed(2)
    layers = []
    for _ in range(2):
        parts = {
            part.name: torch.randint(
                0, 100, (part.count, 60, SIZE, *part.shape), generator=draw,
                dtype=getattr(torch, part.dtype),
            ).to(DEVICE)
            for part in QUANTIZED_FORMATS[name].parts(HEADS, 24)
        }  # fmt: skip
        layers.append(token_parts(QuantizedCache.of(parts)))
    for kind in layers[0]:
        caches = [layer[kind] for layer in layers]
        expected = [cache.clone() for cache in caches]
        before = expected[1].clone()
        Operations().compact_caches(expected, moves)
        TritonOperations().compact_caches(caches, moves)
        for got, want in zip(caches, expected, strict=True):
            assert torch.equal(got, want)
        source = int(moves.chosen[1, 44, 1])
        old = before[:, int(moves.block_table[2, source // SIZE]), source % SIZE, 1]
        new = caches[1][:, int(moves.targets[0, 44 // SIZE]), 44 % SIZE, 1]
        assert torch.equal(new, old)
