"""Tiles of adapters' products, by the rows of a step."""

from __future__ import annotations

from typing import NamedTuple

import triton


class AdapterTiles(NamedTuple):
    """How the two products of a site are divided. A lane is a rank of one of the site's parts."""

    splits: int
    """Programs that share a lane's inputs, at most: each sums a part of them"""
    lanes: int
    """Lanes per program of the first product"""
    block_k: int
    """Inputs at a time, at most"""
    shrink_warps: int
    shrink_stages: int
    """Tiles in flight, in loops of more than UNROLLED"""
    outputs: int
    """Outputs per program of the second product"""
    ranks: int
    """Ranks at a time, at most"""
    expand_warps: int
    early: bool
    """Whether the first product loads its part of A before the kernel ahead of it has ended; if it
    is of several tiles, to the L2 cache"""


TILES: tuple[tuple[int, AdapterTiles], ...] = (
    (1, AdapterTiles(48, 16, 256, 4, 2, 64, 64, 4, early=True)),
    (16, AdapterTiles(48, 16, 256, 4, 2, 256, 64, 4, early=True)),
    (64, AdapterTiles(8, 32, 256, 4, 2, 256, 64, 4, early=True)),
    (256, AdapterTiles(8, 64, 128, 4, 3, 128, 64, 4, early=False)),
    (1024, AdapterTiles(4, 64, 128, 4, 3, 128, 64, 4, early=False)),
)
"""(most rows, tiles). A single adapter at a single row is a megabyte or less, so it is divided into
as many programs as possible; the more rows, the more the partial sums of a split weigh."""
PROMPT_TILES = AdapterTiles(4, 64, 64, 4, 4, 128, 64, 8, early=False)
"""For more rows than TILES has."""
UNROLLED = 4
"""Most tiles of inputs that are loaded at once, without a loop"""


def adapter_tiles(num_rows: int) -> AdapterTiles:
    """Return the tiles for a step of so many rows."""
    return next((tiles for most, tiles in TILES if num_rows <= most), PROMPT_TILES)


class Splits(NamedTuple):
    """How the inputs of a site are divided."""

    splits: int
    steps: int
    """Tiles of each"""
    block_k: int


def split_inputs(tiles: AdapterTiles, inputs: int) -> Splits:
    """Divide so many inputs."""
    width = triton.cdiv(inputs, tiles.splits)
    block_k = min(max(triton.next_power_of_2(width), 16), tiles.block_k)
    steps = triton.cdiv(width, block_k)
    return Splits(triton.cdiv(inputs, steps * block_k), steps, block_k)
