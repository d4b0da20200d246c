"""Inputs of a decode step from four numbers per row, in one launch.

Memory: one row of the block table per row is read and written; everything else is a few numbers per
row. Replaces a dozen indexing operations of one launch each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch

BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _decode_inputs_kernel(
    longs_ptr,
    seq_lens_ptr,
    rows_table_ptr,
    packed_ptr,
    history_ptr,
    table_ptr,
    num_rows,
    stride_history,
    stride_table,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    slot = tl.load(packed_ptr + row).to(tl.int64)
    position = tl.load(packed_ptr + num_rows + row)
    column = tl.load(packed_ptr + 2 * num_rows + row)
    new_block = tl.load(packed_ptr + 3 * num_rows + row)
    token = tl.load(history_ptr + slot * stride_history + position)
    source = table_ptr + slot * stride_table
    target = rows_table_ptr + row.to(tl.int64) * width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        blocks = tl.load(source + at, mask=inside, other=0)
        blocks = tl.where(at == column, new_block, blocks)
        tl.store(target + at, blocks, mask=inside)
    # Read before it is written: the padding rows share a row of the table.
    own = position // BLOCK_SIZE
    block = tl.load(source + own)
    block = tl.where(own == column, new_block, block).to(tl.int64)
    tl.store(source + column, new_block)
    tl.store(longs_ptr + row, slot)
    tl.store(longs_ptr + num_rows + row, token.to(tl.int64))
    tl.store(longs_ptr + 2 * num_rows + row, position.to(tl.int64))
    tl.store(longs_ptr + 3 * num_rows + row, position.to(tl.int64) + 1)
    tl.store(longs_ptr + 4 * num_rows + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(seq_lens_ptr + row, position + 1)


def decode_inputs(
    packed: torch.Tensor, token_history: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, ...]:
    """packed: [4, R] int32, contiguous: each row's slot, its position, and the column and id of a
    block that its slot gets (the last column if it gets none); token_history: [slots, positions]
    int32; block_table: [slots, columns] int32, to which the new blocks are written. All rows have
    different slots, except that padding rows may share one.
    → slots, input ids, positions, lengths (positions + 1), slot mapping: [R] int64 each; lengths
    again as int32; the rows' block tables [R, columns] int32.
    """
    num_rows, width = packed.shape[1], block_table.shape[1]
    device = packed.device
    longs = torch.empty((5, num_rows), dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    rows_table = torch.empty((num_rows, width), dtype=torch.int32, device=device)
    launch(_decode_inputs_kernel, (num_rows,))(
        longs,
        seq_lens,
        rows_table,
        packed,
        token_history,
        block_table,
        num_rows,
        token_history.stride(0),
        block_table.stride(0),
        width,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return (*longs, seq_lens, rows_table)
