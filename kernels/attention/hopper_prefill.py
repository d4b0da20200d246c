"""Causal attention of prompts over a paged cache, on Hopper's asynchronous units.

A warp copies pages to shared memory (TMA) for two or three groups of four warps, of 64 rows each of
a tile. A group multiplies queries by the next keys, and the weights of the tile before by its
values, while it computes the softmax of the scores in between: products and exponentials overlap,
within a group and between groups.

As in paged_attention_prefill.py, a tile's rows are tokens times the query heads that share a key
head (GQA), token-major. A program computes several tiles, so that a launch whose size is a bound
has few programs without one.

Source: Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
import triton
from triton.errors import TritonError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import launch
from .hopper_copies import OUTSIDE, copy_tiles
from .hopper_softmax import attend_rows
from .quantized_tiles import INTERPRETED
from .reach import reach_constants
from .row_tiles import tiles_of_rows

logger = logging.getLogger("jackfield.kernels")

ROWS = 64
"""Rows of a group of warps"""
WIDTH = 64
"""Channels of a copy: 128 bytes, which its pattern of swizzling spans"""
PROGRAMS = 4
"""Most programs per multiprocessor, which holds one at a time"""


class Tiles(NamedTuple):
    block_n: int
    stages: int
    warpgroups: int
    turns: bool = False
    """Whether the two groups start their products in turn"""


TILES = {64: Tiles(128, 4, 3), 128: Tiles(128, 2, 2), 256: Tiles(64, 2, 2, turns=True)}
"""By channels of a head, rounded up. Measured on an H200 (docs/benchmarks/journal.md)."""


@gluon.jit(
    do_not_specialize=["first_row", "num_rows", "stride_table"],
    do_not_specialize_on_alignment=["bounds_ptr"],
)
def _hopper_prefill_kernel(
    out_ptr, query_ptr, key_desc, value_desc, block_table_ptr, query_start_ptr, seq_lens_ptr,
    bounds_ptr, sinks_ptr, scale, value_scale, first_row, num_rows,
    stride_out_token, stride_out_head, stride_query_token, stride_query_head, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr, MIXED: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    BLOCK_Q: gl.constexpr = WARPGROUPS * 64 // GROUP
    if MIXED:
        first_row = gl.load(bounds_ptr)
        num_rows = gl.load(bounds_ptr + 1)
    used = 0
    if num_rows > 0:
        used = tiles_of_rows(query_start_ptr, first_row, num_rows, BLOCK_Q)
    programs = gl.num_programs(0)
    rounds = (used * NUM_KV_HEADS + programs - 1) // programs
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    query_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, 64, BLOCK_D], layout)
    key_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], layout)
    value_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], layout)
    # Full keys, full values, read keys, read values of each stage.
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), 1)
        mbarrier.init(bars.index(STAGES + stage), 1)
        mbarrier.init(bars.index(2 * STAGES + stage), WARPGROUPS)
        mbarrier.init(bars.index(3 * STAGES + stage), WARPGROUPS)
    fence_async_shared()
    tiles = (query_start_ptr, seq_lens_ptr, first_row, num_rows, used, rounds)
    copied = (key_desc, value_desc, key_smem, value_smem, bars, block_table_ptr, stride_table)
    queries = (query_ptr, stride_query_token, stride_query_head, sinks_ptr, scale)
    results = (out_ptr, stride_out_token, stride_out_head, value_scale)
    read = (query_smem, key_smem, value_smem, bars)
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (attend_rows, (
                    0, tiles, queries, results, read, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_Q,
                    BOX, STAGES, WINDOW, CHUNK, SOFT_CAP, SINKS, TURNS,
                )),
                (attend_rows, (
                    1, tiles, queries, results, read, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_Q,
                    BOX, STAGES, WINDOW, CHUNK, SOFT_CAP, SINKS, TURNS,
                )),
                (attend_rows, (
                    2, tiles, queries, results, read, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_Q,
                    BOX, STAGES, WINDOW, CHUNK, SOFT_CAP, SINKS, TURNS,
                )),
                (copy_tiles, (
                    tiles, copied, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_Q, BOX, STAGES, WINDOW,
                    CHUNK,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_rows, (
                    0, tiles, queries, results, read, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_Q,
                    BOX, STAGES, WINDOW, CHUNK, SOFT_CAP, SINKS, TURNS,
                )),
                (attend_rows, (
                    1, tiles, queries, results, read, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_Q,
                    BOX, STAGES, WINDOW, CHUNK, SOFT_CAP, SINKS, TURNS,
                )),
                (copy_tiles, (
                    tiles, copied, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_Q, BOX, STAGES, WINDOW,
                    CHUNK,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


@functools.cache
def num_programs(device: torch.device) -> int:
    """Return the most programs of a launch; 0: the device is no Hopper GPU."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


_failures: list[Exception] = []
"""The first compilation that failed: no launch is tried after it."""


def fails_to_compile(error: Exception) -> bool:
    """Return whether Triton, in some other version, could not compile the kernel, and log that."""
    if not isinstance(error, TritonError) and "PassManager" not in str(error):
        return False
    _failures.append(error)
    reason = str(error).strip().splitlines()[-1:]
    logger.warning(
        "prompts take the slower kernel for any GPU: Triton %s does not compile Hopper's %s; "
        "install Triton 3.6 or 3.7, or choose --attention-backend triton_portable",
        triton.__version__, reason,
    )  # fmt: skip
    return True


def takes_heads(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Return whether the kernel computes heads of `head_dim` channels there, over caches of the
    same type as queries. Sizes in between would be padded: not yet seen right on a device."""
    return (
        head_dim in TILES
        and dtype in (torch.bfloat16, torch.float16)
        and not INTERPRETED
        and not _failures
        and num_programs(device) > 0
    )


def takes(query: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Return whether the kernel computes queries over this cache: one whose pages lie one after the
    other, each with whole rows of swizzled lines."""
    keys, head_dim = kv_cache[0], query.shape[2]
    num_blocks, block_size, num_kv_heads, _ = keys.shape
    return (
        takes_heads(query.dtype, head_dim, query.device)
        and query.shape[1] // num_kv_heads <= TILES[head_dim].warpgroups * ROWS
        and kv_cache.dtype == query.dtype
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and keys.stride(0) == block_size * keys.stride(1)
        and keys.stride(2) == head_dim
        and num_blocks * block_size <= OUTSIDE.value
    )


def hopper_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    value_scale: float,
    num_tokens: int,
    first_row: int,
    num_rows: int,
    bounds: torch.Tensor | None,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    chunk_lookback: int,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    tiles: Tiles | None = None,
    most_programs: int | None = None,
) -> torch.Tensor:
    """Compute what `paged_attention_prefill` does, whose arguments these are; num_rows: with
    `bounds` the largest possible number."""
    head_dim = query.shape[2]
    keys, values = kv_cache[0], kv_cache[1]
    num_blocks, block_size, num_kv_heads, _ = keys.shape
    group = query.shape[1] // num_kv_heads
    block_d = triton.next_power_of_2(head_dim)
    tiles = tiles or TILES[block_d]
    box = min(block_size, tiles.block_n)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    shape = [num_blocks * block_size, num_kv_heads * head_dim]
    key_desc, value_desc = (
        TensorDescriptor(part, shape, [part.stride(1), 1], [box, WIDTH], layout)
        for part in (keys, values)
    )
    num_tiles = num_tokens // (tiles.warpgroups * ROWS // group) + num_rows
    programs = min(num_tiles * num_kv_heads, most_programs or num_programs(query.device))
    launch(_hopper_prefill_kernel, (programs,))(
        out,
        query,
        key_desc,
        value_desc,
        block_table,
        query_start,
        seq_lens,
        seq_lens if bounds is None else bounds,
        seq_lens if sinks is None else sinks,
        scale,
        value_scale,
        first_row,
        num_rows,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        **reach_constants(sliding_window, attention_chunk_size, chunk_lookback),
        SOFT_CAP=soft_cap or 0.0,
        SINKS=sinks is not None,
        MIXED=bounds is not None,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        BOX=box,
        STAGES=tiles.stages,
        WARPGROUPS=tiles.warpgroups,
        TURNS=tiles.turns,
        num_warps=4,
    )
    return out
