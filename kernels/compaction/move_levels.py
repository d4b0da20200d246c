"""Moves between levels of KV caches: tokens of all layers, heads and requests in one launch.

A program takes a tile of the tokens that one copy appends, of one head of one layer's keys or
values: it reads them where they are, in the bits that they have there, and writes them in those of
their new level, with a scale and a zero of each token and head. What tiles are of which copy, and
their blocks, comes as one table of integers. No program reads what another one writes.

Memory: each token is read and written once, in the bits of its levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl

from ..attention.quantized_tiles import head_codes, head_words, word_scale, word_zero
from ..launch import launch
from .caches import addresses_of, cache_of_layer

Form: TypeAlias = tuple[int, int]
"""Bits, and tokens of a block."""
Copy: TypeAlias = tuple[Form, Sequence[int], Form, Sequence[int], int, int, "torch.Tensor | None"]
TILE_TOKENS = 64
TILE = tl.constexpr(2)
"""Numbers of a tile in the plan: its copy, and its first token."""
COPY = tl.constexpr(9)
"""Numbers of a copy: bits, tokens of a block and place of the blocks in the list of all, of source
and target; tokens; tokens that the first target has; place of the chosen tokens, or -1."""


@triton.jit
def _read(
    part, block, place, inside, head, channel, in_half, BITS: tl.constexpr, tokens,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Return both halves of tokens' channels, [N, BLOCK_H] float32. block: [N] int64; place: [N]"""
    HALF: tl.constexpr = WIDTH // 2
    BYTES: tl.constexpr = WIDTH * BITS // 8
    mask = inside[:, None] & in_half[None, :]
    if BITS == 16:
        own = part + block * (tokens * NUM_HEADS * WIDTH) + (place * NUM_HEADS + head) * WIDTH
        own = own[:, None] + channel[None, :]
        low = tl.load(own, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(own + HALF, mask=mask, other=0.0).to(tl.float32)
        return low, high
    else:
        words_ptr = part.to(tl.pointer_type(tl.int32))
        at = block * (BLOCK_BYTES // 4) + tokens * (NUM_HEADS * BYTES // 4) + head * tokens + place
        words = tl.load(words_ptr + at, mask=inside, other=0)
        scale = word_scale(words)[:, None]
        zero = word_zero(words)[:, None]
        codes_ptr = part.to(tl.pointer_type(tl.int8 if BITS == 8 else tl.uint8))
        own = codes_ptr + block * BLOCK_BYTES + (place * NUM_HEADS + head) * BYTES
        own = own[:, None] + channel[None, :]
        codes = tl.load(own, mask=mask, other=0).to(tl.int32)
        if BITS == 8:
            high_codes = tl.load(own + HALF, mask=mask, other=0).to(tl.int32)
            return zero + scale * codes.to(tl.float32), zero + scale * high_codes.to(tl.float32)
        else:
            low = zero + scale * ((codes & 15).to(tl.float32) - 7.5)
            return low, zero + scale * ((codes >> 4).to(tl.float32) - 7.5)


@triton.jit
def _write(
    part, block, place, inside, head, channel, in_half, low, high, BITS: tl.constexpr, tokens,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    BYTES: tl.constexpr = WIDTH * BITS // 8
    mask = inside[:, None] & in_half[None, :]
    if BITS == 16:
        own = part + block * (tokens * NUM_HEADS * WIDTH) + (place * NUM_HEADS + head) * WIDTH
        own = own[:, None] + channel[None, :]
        tl.store(own, low.to(part.dtype.element_ty), mask=mask)
        tl.store(own + HALF, high.to(part.dtype.element_ty), mask=mask)
    else:
        beside = ~in_half[None, :]
        lowest = tl.min(tl.where(beside, float("inf"), tl.minimum(low, high)), axis=1)
        highest = tl.max(tl.where(beside, -float("inf"), tl.maximum(low, high)), axis=1)
        scale, zero, words = head_words(lowest, highest, BITS)
        words_ptr = part.to(tl.pointer_type(tl.int32))
        at = block * (BLOCK_BYTES // 4) + tokens * (NUM_HEADS * BYTES // 4) + head * tokens + place
        tl.store(words_ptr + at, words, mask=inside)
        low_codes = head_codes(low, scale, zero, BITS)
        high_codes = head_codes(high, scale, zero, BITS)
        own = part.to(tl.pointer_type(tl.int8 if BITS == 8 else tl.uint8))
        own = own + block * BLOCK_BYTES + (place * NUM_HEADS + head) * BYTES
        own = own[:, None] + channel[None, :]
        if BITS == 8:
            tl.store(own, low_codes.to(tl.int8), mask=mask)
            tl.store(own + HALF, high_codes.to(tl.int8), mask=mask)
        else:
            tl.store(own, (low_codes | (high_codes << 4)).to(tl.uint8), mask=mask)


@triton.jit(
    do_not_specialize=["copies_at", "blocks_at"],
    do_not_specialize_on_alignment=["plan_ptr", "chosen_ptr"],
)
def _move_levels_kernel(
    sources_ptr,
    targets_ptr,
    like_ptr,
    plan_ptr,
    chosen_ptr,
    copies_at,
    blocks_at,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    CHOSEN_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per (tile, head, part of a layer)."""
    tile = plan_ptr + tl.program_id(0) * TILE
    head = tl.program_id(1)
    part = tl.program_id(2)
    copy = plan_ptr + copies_at + tl.load(tile) * COPY
    source_bits = tl.load(copy)
    source_tokens = tl.load(copy + 1)
    target_bits = tl.load(copy + 3)
    target_tokens = tl.load(copy + 4)
    count = tl.load(copy + 6)
    number = tl.load(tile + 1) + tl.arange(0, BLOCK_N)
    inside = number < count
    index = number
    if CHOSEN_HEADS > 0:
        chosen_at = tl.load(copy + 8)
        if chosen_at >= 0:
            layer = (part // NUM_PARTS).to(tl.int64)
            at = chosen_at + (layer * count + number) * CHOSEN_HEADS
            if CHOSEN_HEADS > 1:
                at += head
            index = tl.load(chosen_ptr + at, mask=inside, other=0)
    blocks = plan_ptr + blocks_at
    listed = blocks + tl.load(copy + 2) + index // source_tokens
    read = tl.load(listed, mask=inside, other=0).to(tl.int64)
    read_place = index % source_tokens
    place = tl.load(copy + 7) + number
    listed = blocks + tl.load(copy + 5) + place // target_tokens
    written = tl.load(listed, mask=inside, other=0).to(tl.int64)
    place = place % target_tokens

    channel = tl.arange(0, BLOCK_H)
    in_half = channel < WIDTH // 2
    source = cache_of_layer(sources_ptr, part, like_ptr, ALIGNED)
    target = cache_of_layer(targets_ptr, part, like_ptr, ALIGNED)
    if source_bits == 16:
        low, high = _read(
            source, read, read_place, inside, head, channel, in_half, 16, source_tokens,
            NUM_HEADS, WIDTH, BLOCK_BYTES,
        )  # fmt: skip
    elif source_bits == 8:
        low, high = _read(
            source, read, read_place, inside, head, channel, in_half, 8, source_tokens,
            NUM_HEADS, WIDTH, BLOCK_BYTES,
        )  # fmt: skip
    else:
        low, high = _read(
            source, read, read_place, inside, head, channel, in_half, 4, source_tokens,
            NUM_HEADS, WIDTH, BLOCK_BYTES,
        )  # fmt: skip
    # As in its twin, which keeps them in the model's type in between.
    low = low.to(like_ptr.dtype.element_ty).to(tl.float32)
    high = high.to(like_ptr.dtype.element_ty).to(tl.float32)
    if target_bits == 16:
        _write(
            target, written, place, inside, head, channel, in_half, low, high, 16, target_tokens,
            NUM_HEADS, WIDTH, BLOCK_BYTES,
        )  # fmt: skip
    elif target_bits == 8:
        _write(
            target, written, place, inside, head, channel, in_half, low, high, 8, target_tokens,
            NUM_HEADS, WIDTH, BLOCK_BYTES,
        )  # fmt: skip
    else:
        _write(
            target, written, place, inside, head, channel, in_half, low, high, 4, target_tokens,
            NUM_HEADS, WIDTH, BLOCK_BYTES,
        )  # fmt: skip


def move_levels(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    copies: Sequence[Copy],
) -> None:
    """See `core.nn.operations.Operations.move_levels`, whose `LevelCopy`s these are. All sources
    are alike, and all targets; no host synchronisation.
    """
    part = sources[0]
    _, block_size, num_heads, width = part.shape
    device = part.device
    source_places, aligned = addresses_of(sources)
    target_places, also = addresses_of(targets)
    tiles: list[tuple[int, int]] = []
    described: list[tuple[int, ...]] = []
    blocks: list[int] = []
    chosen: list[torch.Tensor] = []
    num_chosen, layers, heads = 0, 1, 0
    for number, (source, read, target, written, first, count, index) in enumerate(copies):
        tiles += [(number, begin) for begin in range(0, count, TILE_TOKENS)]
        at = len(blocks)
        blocks += [*read, *written]
        own = (*source, at, *target, at + len(read), count, first)
        described.append((*own, -1 if index is None else num_chosen))
        if index is not None:
            chosen.append(index.reshape(-1))
            num_chosen += index.numel()
            layers, heads = index.shape[0], index.shape[2]
    parts = [np.array(each, dtype=np.int32).reshape(-1) for each in (tiles, described, blocks)]
    sent = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        sent = sent.pin_memory()
    sent = sent.to(device, non_blocking=True)
    copies_at = len(parts[0])
    launch(_move_levels_kernel, (len(tiles), num_heads, len(sources)))(
        source_places,
        target_places,
        part,
        sent,
        torch.cat(chosen) if len(chosen) > 1 else (chosen or [sent])[0],
        copies_at,
        copies_at + len(parts[1]),
        NUM_PARTS=len(sources) // layers,
        NUM_HEADS=num_heads,
        CHOSEN_HEADS=heads,
        WIDTH=width,
        BLOCK_BYTES=block_size * num_heads * width * part.element_size(),
        BLOCK_N=TILE_TOKENS,
        BLOCK_H=triton.next_power_of_2(max(2, width // 2)),
        ALIGNED=aligned and also,
        num_warps=4,
    )
