"""Tiles of hopper_prefill.py's programs, and what brings their keys and values to shared memory.

Tiles of keys are counted over all tiles of a program, by each of its parts alike: the count gives
the stage in which one lies, and how often that was used before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .reach import last_hidden
from .row_tiles import row_of_tile

OUTSIDE = gl.constexpr(1 << 30)
"""A token beyond any cache, for which a copy fills in zeros"""


@gluon.jit
def tile_of(
    number, tiles, NUM_KV_HEADS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Return what a tile is: kv head, row, first query in it, the row's first token and queries,
    its length, the first and last position of the queries, the first key's, and the tiles of keys
    (of none, if it has no queries)."""
    query_start_ptr, seq_lens_ptr, first_row, num_rows, used, _rounds = tiles
    kv_head = number % NUM_KV_HEADS
    # Later tiles see more keys: start them first.
    tile = used - 1 - number // NUM_KV_HEADS
    row, place = row_of_tile(tile, query_start_ptr, first_row, num_rows, BLOCK_Q)
    row_start = gl.load(query_start_ptr + row)
    query_len = gl.load(query_start_ptr + row + 1) - row_start
    seq_len = gl.load(seq_lens_ptr + row)
    tile_start = place * BLOCK_Q
    first = seq_len - query_len + tile_start
    last = gl.minimum(first + BLOCK_Q, seq_len) - 1
    end = last // BLOCK_N + 1
    begin = 0
    lower = 0
    if WINDOW > 0:
        lower = gl.maximum(last_hidden(first, WINDOW, CHUNK) + 1, 0)
        begin = lower // BLOCK_N
    if tile_start >= query_len:
        begin = end
    return kv_head, row, tile_start, row_start, query_len, seq_len, first, last, lower, begin, end


@gluon.jit
def number_of(round):
    """Return the number of this program's tile in a round: forwards and backwards alternately, so
    that the programs' sums are alike."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    if round % 2 == 1:
        program = programs - 1 - program
    return round * programs + program


@gluon.jit
def copy_tiles(
    tiles, copied, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_Q: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Copy each tile's pages, the last keys first, to where the groups have read those before."""
    key_desc, value_desc, key_smem, value_smem, bars, table_ptr, stride_table = copied
    BLOCK_N: gl.constexpr = key_smem.shape[1]
    BLOCK_D: gl.constexpr = key_smem.shape[2]
    COPIES: gl.constexpr = BLOCK_N // BOX
    PARTS: gl.constexpr = BLOCK_D // 64
    BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    key_boxes = key_smem._reinterpret(
        key_smem.dtype, [STAGES * PARTS * COPIES, BOX, 64], key_smem.layout
    )
    value_boxes = value_smem._reinterpret(
        value_smem.dtype, [STAGES * PARTS * COPIES, BOX, 64], value_smem.layout
    )
    count = 0
    for round in range(tiles[5]):
        number = number_of(round)
        if number < tiles[4] * NUM_KV_HEADS:
            kv_head, row, _s, _r, _q, seq_len, _f, _l, lower, begin, end = tile_of(
                number, tiles, NUM_KV_HEADS, BLOCK_Q, BLOCK_N, WINDOW, CHUNK
            )
            table = table_ptr + row.to(gl.int64) * stride_table
            column = kv_head * HEAD_DIM
            for i in range(end - begin):
                stage = count % STAGES
                phase = (count // STAGES) & 1
                base = (end - 1 - i) * BLOCK_N
                tokens = ()
                for copy in gl.static_range(COPIES):
                    position = base + copy * BOX
                    exists = position < seq_len
                    if WINDOW > 0:
                        exists = exists & (position + BOX > lower)
                    page = gl.load(table + position // BLOCK_SIZE, mask=exists, other=0)
                    token = page * BLOCK_SIZE + position % BLOCK_SIZE
                    tokens += (gl.where(exists, token, OUTSIDE),)  # type: ignore[assignment]
                full = bars.index(stage)
                mbarrier.wait(bars.index(2 * STAGES + stage), phase ^ 1)
                mbarrier.expect(full, BYTES)
                for copy in gl.static_range(COPIES):
                    for part in gl.static_range(PARTS):
                        tma.async_copy_global_to_shared(
                            key_desc, [tokens[copy], column + part * 64], full,
                            key_boxes.index((stage * PARTS + part) * COPIES + copy),
                        )  # fmt: skip
                full = bars.index(STAGES + stage)
                mbarrier.wait(bars.index(3 * STAGES + stage), phase ^ 1)
                mbarrier.expect(full, BYTES)
                for copy in gl.static_range(COPIES):
                    for part in gl.static_range(PARTS):
                        tma.async_copy_global_to_shared(
                            value_desc, [tokens[copy], column + part * 64], full,
                            value_boxes.index((stage * PARTS + part) * COPIES + copy),
                        )  # fmt: skip
                count += 1
