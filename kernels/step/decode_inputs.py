"""Inputs of a decode step from two numbers per row, in one launch.

Memory: a block table row for each row whose slot changed, and a few numbers per row. Replaces a
dozen launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, pdl_options

BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows", "last_slot"])
def _decode_inputs_kernel(
    longs_ptr,
    seq_lens_ptr,
    row_tables_ptr,
    packed_ptr,
    lengths_ptr,
    dropped_ptr,
    history_ptr,
    table_ptr,
    num_rows,
    last_slot,
    stride_history,
    stride_table,
    width,
    DROPPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    word = tl.load(packed_ptr + row).to(tl.int64)
    slot = tl.where(word < 0, -1 - word, word)
    new_block = tl.load(packed_ptr + num_rows + row)
    position = tl.load(lengths_ptr + slot)
    place = position
    if DROPPED:
        place -= tl.load(dropped_ptr + slot)
    own = place // BLOCK_SIZE
    gets_block = new_block > 0
    token = tl.load(history_ptr + slot * stride_history + position)
    source = table_ptr + slot * stride_table
    target = row_tables_ptr + row.to(tl.int64) * width
    copied = tl.where(word < 0, 0, width)
    for start in range(0, copied, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < copied
        blocks = tl.load(source + at, mask=inside, other=0)
        tl.store(target + at, blocks, mask=inside)
    block = tl.load(source + own)
    block = tl.where(gets_block, new_block, block).to(tl.int64)
    # All threads have read the length, and copied the table, before one writes into them.
    tl.debug_barrier()
    tl.store(source + own, new_block, mask=gets_block)
    tl.store(target + own, new_block, mask=gets_block)
    tl.store(lengths_ptr + slot, position + 1, mask=slot < last_slot)
    tl.store(longs_ptr + row, slot)
    tl.store(longs_ptr + num_rows + row, token.to(tl.int64))
    tl.store(longs_ptr + 2 * num_rows + row, position.to(tl.int64))
    tl.store(longs_ptr + 3 * num_rows + row, position.to(tl.int64) + 1)
    tl.store(longs_ptr + 4 * num_rows + row, block * BLOCK_SIZE + place % BLOCK_SIZE)
    tl.store(seq_lens_ptr + row, place + 1)


def decode_inputs(
    packed: torch.Tensor,
    lengths: torch.Tensor,
    token_history: torch.Tensor,
    block_table: torch.Tensor,
    row_tables: torch.Tensor,
    block_size: int,
    dropped: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """packed: [2, R] int32, contiguous: each row's slot (-1 - slot: `row_tables` has its table but
    for the new block), and the block that it gets for its token (0: it has one); lengths: [slots]
    int32: each row's position, and 1 more afterwards; token_history: [slots, positions] int32;
    block_table: [slots, columns] int32, to which new blocks are written; row_tables: [R,
    columns] int32, contiguous, which is returned; dropped: [slots] int32, tokens that the slots'
    caches have lost (None: none has). All rows have different slots, except that padding rows share
    the last one, whose length is 0 and stays so.
    → slots, input ids, positions, lengths (positions + 1), slot mapping: [R] int64 each; lengths of
    the caches as int32; the rows' block tables [R, columns] int32.
    """
    num_rows, width = packed.shape[1], block_table.shape[1]
    device = packed.device
    longs = torch.empty((5, num_rows), dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    launch(_decode_inputs_kernel, (num_rows,))(
        longs,
        seq_lens,
        row_tables,
        packed,
        lengths,
        dropped,
        token_history,
        block_table,
        num_rows,
        lengths.shape[0] - 1,
        token_history.stride(0),
        block_table.stride(0),
        width,
        DROPPED=dropped is not None,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        PDL=bool(pdl_options(device)),
        num_warps=4,
    )
    return (*longs, seq_lens, row_tables)
