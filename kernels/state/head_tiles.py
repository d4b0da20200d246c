"""Tiles of a step of one token per row, whose programs walk over the heads of a group."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

FEW_ROWS = 4
"""Most rows with one tile per program, as programs are few."""


class StepConfig(NamedTuple):
    channels: int
    num_warps: int
    tiles: int = 1
    """Tiles per program; a power of two."""

    def programs(self, heads: int, width: int) -> int:
        return int(triton.cdiv(heads * triton.cdiv(width, self.channels), self.tiles))

    @property
    def wide(self) -> int:
        """A program's channels, or threads if these are more: see `head_tile`."""
        return max(self.tiles * self.channels, 32 * self.num_warps)


@triton.jit
def head_tile(tile, own, group, EACH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the head of a group's tile, the tile's channels of that head, and which exist.

    own: places in the tile, [BLOCK]; `tile`: a scalar, or of the same shape. Load a program's
    channels with all threads at once, then gather: with fewer channels than threads, each thread
    would load all channels that it multiplies (Triton 3.7).
    """
    PER_HEAD: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    place = tile % PER_HEAD * BLOCK + own
    inside = place < tl.where(tile < EACH * PER_HEAD, WIDTH, 0)
    return group * EACH + tile // PER_HEAD, place, inside


@triton.jit
def head_numbers(
    numbers_ptr, first, group, HEADS: tl.constexpr, EACH: tl.constexpr, PER_HEAD: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Return the numbers of the heads of TILES tiles from `first` on, float32.

    numbers_ptr: [HEADS]; PER_HEAD: tiles of a head
    """
    numbers = ()
    for tile in tl.static_range(TILES):
        head = tl.minimum(group * EACH + (first + tile) // PER_HEAD, HEADS - 1)
        number = tl.load(numbers_ptr + head).to(tl.float32)
        numbers = numbers + (number,)  # type: ignore[assignment]  # noqa: RUF005
    return numbers
