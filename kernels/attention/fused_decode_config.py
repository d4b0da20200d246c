"""What a launch of fused decode attention chooses: splits, keys loaded before the projection is
ready, weights prefetched for the next kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from .decode_splits import MIN_SPLIT_TILES
from .quantized_tiles import FLOATS, CacheArguments, block_width

EARLY_WIDTH = 4096
"""Total width of heads from which the next kernel may start early (as in gemv.py): the weight is
then large. With keys ahead it may always."""
MAX_GROUP_WIDTH = 1 << 13
"""Most channels of the query heads that share a key head: registers hold them."""
PRELOAD_BYTES = 1 << 14
"""Most bytes of the shortest split's keys that are loaded before the projection is ready: registers
hold them."""
PRELOAD_BEHIND = 1 << 24
"""Bytes of the projection's weight from which keys are preloaded under grouped queries; smaller
weights gain nothing."""
NEW_TOKEN_PROGRAM_ROWS = 1
"""Most rows whose new token gets a program of its own, if the sequence has several splits. Saves
0.4 to 0.6 us per layer on an H200."""
AHEAD_ROWS = 1
"""Most rows whose programs have their next keys ahead in registers. With little shared memory they
can lie beside the projection's, and load their first keys meanwhile. Two rows are slower so."""
AHEAD_BYTES = 1 << 13
"""Most bytes of keys that a program has ahead."""
AHEAD_PER_SM = 3
"""Programs with keys ahead that a multiprocessor runs at once, by their registers."""
INTERPRETER_PROGRAMS = 64
"""The same for all of Triton's interpreter."""
PREFETCH_BYTES = 8 << 20
"""Bytes of the next weights to prefetch; more delays the products."""
PREFETCH_PROGRAMS = 32
"""Programs that prefetch them, approximately."""
JOIN_SPLITS = 8
"""Most splits joined per iteration."""
AHEAD_JOIN_SPLITS = 32
"""The same with keys ahead. Saves 1 to 2.5 us from 1,024 tokens on."""
JOIN_ELEMENTS = 1 << 14
"""Most channels joined per iteration: registers hold them."""


class FusedDecodeConfig(NamedTuple):
    num_splits: int
    min_tiles: int
    """Fewest tiles of keys per split"""
    join_splits: int
    """Splits joined per iteration"""
    new_token_program: bool
    """Whether the new token has a program of its own"""
    preload: bool
    """Whether keys are loaded before the projection is ready: those of the shortest splits"""
    ahead: bool
    """Whether programs have their next keys ahead in registers, and preload the first ones of any
    split"""
    early_launch: bool
    """Whether the next kernel may start when this one does"""


def fused_decode_config(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cache: CacheArguments,
    block_n: int,
    num_splits: int,
    *,
    leveled: bool,
) -> FusedDecodeConfig:
    """Return the choices for a projection, tiles of `block_n` keys and at most `num_splits` splits.
    leveled: the first blocks of rows may have tokens in fewer bits."""
    num_rows, width = qkv.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    group, block_d = num_heads // num_kv_heads, block_width(head_dim)
    floats = cache.key_bits == FLOATS and not leveled
    min_tiles = MIN_SPLIT_TILES
    tile_bytes = block_n * block_d * qkv.element_size()
    ahead = num_rows <= AHEAD_ROWS and floats and not cache.is_fp8 and tile_bytes <= AHEAD_BYTES
    if ahead:
        # Others would begin when the first ones end.
        num_splits = min(num_splits, max(1, _programs_at_once(qkv.device) // num_kv_heads))
        min_tiles = min(MIN_SPLIT_TILES, AHEAD_BYTES // tile_bytes)
    preload = ahead or (
        floats
        and MIN_SPLIT_TILES * tile_bytes <= PRELOAD_BYTES
        and (group == 1 or width * num_heads * head_dim * qkv.element_size() > PRELOAD_BEHIND)
    )
    join_splits = AHEAD_JOIN_SPLITS if ahead else JOIN_SPLITS
    join_splits = min(
        join_splits, max(1, JOIN_ELEMENTS // (triton.next_power_of_2(group) * block_d))
    )
    return FusedDecodeConfig(
        num_splits,
        min_tiles,
        min(join_splits, triton.next_power_of_2(num_splits)),
        new_token_program=num_rows <= NEW_TOKEN_PROGRAM_ROWS and num_splits > 1,
        preload=preload,
        ahead=ahead,
        early_launch=ahead or num_heads * head_dim >= EARLY_WIDTH,
    )


@functools.cache
def _programs_at_once(device: torch.device) -> int:
    """Return the programs with keys ahead that the device runs at once."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return int(AHEAD_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count)


def fits_registers(group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether one launch can serve `group` query heads that share a key head.

    With float32 heads over 256 channels the kernel spilled 1,344 bytes per thread, and gave wrong
    results on an H200 with 8-bit keys and 4-bit values.
    """
    if head_dim > 256 and dtype == torch.float32:
        return False
    widths = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    return bool(widths <= MAX_GROUP_WIDTH)


def prefetched_weights(weights: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the first bytes to prefetch of two weights, as a kernel's arguments: each weight and a
    number of bytes. Empty: none can be."""
    left, prefetched = PREFETCH_BYTES, []
    for weight in weights[:2]:
        num_bytes = min(weight.nbytes, left) // 1024 * 1024
        if num_bytes and weight.data_ptr() % 16 == 0:
            prefetched += [weight, num_bytes]
            left -= num_bytes
    return (*prefetched, *prefetched[:1], 0) if len(prefetched) == 2 else tuple(prefetched)
