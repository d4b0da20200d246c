"""Moves between levels in one launch, against their twin in torch."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.cache.level_options import LevelFormat, level_format
from jackfield.core.nn.kv_cache.level_cache import LevelPart
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.step_operations.compaction import LevelCopy
from jackfield.core.parts.kv_compression import LevelMove, LevelMoves, LevelTarget
from jackfield.core.protocols.attention import AttentionSpec
from jackfield.core.worker.parts.compacted_layers import KeyValueLayer
from jackfield.core.worker.parts.level_moves import LevelMover
from jackfield.kernels.compaction import move_levels as kernel
from jackfield.plugins.operations.triton import TritonOperations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, LAYERS = 4, 3


@pytest.mark.parametrize(
    "heads,width,parts,chosen_heads",
    [(2, 32, 2, 2), (2, 24, 2, 2), (5, 8, 1, 1)],
    ids=["keys and values", "of an odd width", "a latent's groups"],
)
@pytest.mark.parametrize("staged", [False, True])
def test_it_equals_its_twin(
    heads: int, width: int, parts: int, chosen_heads: int, staged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All pairs of levels in one launch, with chosen tokens and without, into blocks that are begun
    and into others; from the same caches or from others."""
    monkeypatch.setattr(kernel, "TILE_TOKENS", 16)
    draw = torch.Generator().manual_seed(1)
    whole = LevelFormat(16, SIZE)
    forms = [whole, *(level_format(bits, SIZE, width, 4) for bits in (8, 4))]
    free = iter((torch.randperm(249, generator=draw) + 1).tolist())

    def numbers(blocks: int) -> list[torch.Tensor]:
        shape = blocks, SIZE, heads, width
        return [torch.randn(shape, generator=draw) for _ in range(LAYERS * parts)]

    caches, copies = numbers(250), []
    for source, target, chooses in itertools.product(forms, forms, (False, True)):
        count, room, first = (30, 47, 0) if chooses else (41, 41, 3)
        read = [next(free) for _ in range(-(-room // source.tokens))]
        written = [next(free) for _ in range(-(-(first + count) // target.tokens))]
        index = None
        if chooses:
            order = torch.rand((LAYERS, room, chosen_heads), generator=draw).argsort(1)[:, :count]
            index = order.sort(1).values.int().to(DEVICE)
        # Codes, scales and zeros that are numbers.
        own = LevelCopy(whole, range(12), source, read, 0, room)
        Operations().move_levels(numbers(12), caches, [own])
        copies.append(LevelCopy(source, read, target, written, first, count, index))
    expected = [each.clone() for each in caches]
    sources = [each.clone() for each in caches] if staged else expected
    Operations().move_levels(sources, expected, copies)
    got = [each.clone().to(DEVICE) for each in caches]
    sources = [each.clone().to(DEVICE) for each in caches] if staged else got
    TritonOperations().move_levels(sources, got, copies)
    changed = 0
    for one, other, before in zip(got, expected, caches, strict=True):
        # As bytes: codes are no floats.
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))
        changed += int((other.view(torch.uint8) != before.view(torch.uint8)).sum())
    assert changed


class Layer(KeyValueLayer):
    """Keys and values of two heads, without a model."""

    def __init__(self, cache: torch.Tensor) -> None:
        spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=16, scale=1.0)
        self.layer = SimpleNamespace(spec=spec, group=0, kv_cache=cache)  # type: ignore[assignment]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_plan_is_one_launch(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests, one of which has two moves, in three layers. Where there is no room but that
    of the tokens that move, they are read as a whole first: two launches, and the same bytes."""
    launches = []
    launch = kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *own: launches.append(own) or launch(*own))
    draw = torch.Generator().manual_seed(2)
    before = [torch.randn(2, 60, SIZE, 2, 16, generator=draw).to(DEVICE) for _ in range(LAYERS)]
    forms = [level_format(bits, SIZE, 16, 4) for bits in (8, 4)]

    def run(at: int) -> list[torch.Tensor]:
        """Return what is in levels afterwards. at: the first of the blocks that are written"""
        caches = [each.clone() for each in before]
        layers = [Layer(each) for each in caches]
        mover = LevelMover(None, "", layers, forms, SIZE, TritonOperations(), torch.float32)

        def move(first: int, count: int, level: int, block: int) -> LevelMove:
            blocks = tuple(range(first, first + count // SIZE))
            columns = -(-count // forms[level - 1].tokens)
            taken = tuple(range(at + block, at + block + columns))
            return LevelMove(0, count, (blocks,), (LevelTarget(level, 0, count, (taken,)),))

        first = LevelMoves(1, 99, 0, (move(1, 40, 2, 0), move(11, 20, 1, 2)), ((),), (0, 0))
        second = LevelMoves(0, 99, 0, (move(21, 36, 1, 4),), ((),), (0, 0))
        assert not mover.run([first, second])
        return [
            LevelPart.of(part, forms[level - 1]).read(blocks + at + block, torch.float32)[:count]
            for part in (part for each in caches for part in each)
            for level, block, count in ((2, 0, 40), (1, 2, 20), (1, 4, 36))
            for blocks in [torch.arange(-(-count // forms[level - 1].tokens), device=DEVICE)]
        ]

    fresh = run(40)
    assert len(launches) == 1
    if in_place:
        launches.clear()
        # The second request's go where the first one's were read.
        assert all(map(torch.equal, run(9), fresh))
        assert len(launches) == 2
    else:
        old = before[0][0, 1:11].flatten(0, 1)
        assert (fresh[0] - old).abs().max() < 0.3 < old.abs().max()
