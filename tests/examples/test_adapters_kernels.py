"""The benchmark of adapters' kernels checks them on any machine, if small."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from programs import benchmark

from jackfield.core.nn.operations import Operations

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = torch.device("cuda" if CUDA else "cpu"), torch.float16


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    module = benchmark("adapters_kernels")
    monkeypatch.setattr(module, "SITES", {"small": (96, (0, 48, 64, 80))})
    monkeypatch.setattr(module, "MOST_DECODE_TOKENS", 20)
    return module


@pytest.mark.parametrize(
    ("rows", "adapters", "rank"), [(1, 1, "16"), (9, 4, "mixed"), (40, 2, "8")]
)
def test_it_finds_the_kernels_right(bench, rows: int, adapters: int, rank: str) -> None:
    assert bench.check("small", rows, adapters, rank, DEVICE, DTYPE) < bench.BOUND / 4


def test_it_finds_a_wrong_scale(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Operations.add_adapters

    def wrong(self, out, x, chunks, site):
        right(self, out, x, chunks, site._replace(scales=site.scales * 1.2))

    monkeypatch.setattr(Operations, "add_adapters", wrong)
    assert bench.check("small", 9, 4, "mixed", DEVICE, DTYPE) > bench.BOUND


def test_it_counts_the_bytes_of_ranks_alone(bench) -> None:
    # 8 ranks of 96 + 48 numbers and 2 of 96 + 16; one row of 96, and 80 outputs twice.
    assert bench.floor_bytes("small", 1, [[8, 0, 2]]) == 2 * (8 * 144 + 2 * 112 + 96 + 160)


def test_every_candidate_changes_one_thing(bench) -> None:
    found = dict(bench.candidates(8))
    default = found.pop("default")
    assert len(found) > 15
    for label, tiles in found.items():
        field, _, value = label.partition("=")
        assert str(getattr(tiles, field)) == value
        assert sum(a != b for a, b in zip(tiles, default, strict=True)) == 1
