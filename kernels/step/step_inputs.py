"""Inputs of a step of ragged rows from three numbers per row; the slots' new lengths; scattered
writes: one launch each.

Memory: a row of the block table is read and written for each row of the step; everything else is a
few numbers per token. The launches depend on nothing but their grids, so a graph may contain them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch

TOKENS = 128
COLUMNS = 1024
"""Columns of the block table that are copied at a time."""
WRITES = 1024
ROWS = 512
"""Rows per program of a kernel that only counts."""

_PLACES = ["query_start_ptr", "slots_ptr", "sample_slots_ptr"]


@triton.jit
def rows_of(query_start_ptr, token, num_rows, TOKENS: tl.constexpr):
    """Return the last row that begins at or before each token; rows without tokens come last."""
    low = tl.zeros([TOKENS], tl.int32)
    high = tl.zeros([TOKENS], tl.int32) + num_rows
    left = num_rows
    while left > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_ptr + middle) <= token
        narrow = high - low > 1
        low = tl.where(before & narrow, middle, low)
        high = tl.where(narrow & (before == 0), middle, high)
        left = (left + 1) // 2
    return low


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "token_programs",
        "stride_tokens",
        "stride_rows",
        "width",
        "stride_table",
    ],
    do_not_specialize_on_alignment=_PLACES,
)
def _step_inputs_kernel(
    token_longs_ptr,
    row_longs_ptr,
    seq_lens_ptr,
    rows_table_ptr,
    query_start_ptr,
    slots_ptr,
    sample_slots_ptr,
    lengths_ptr,
    dropped_ptr,
    history_ptr,
    table_ptr,
    num_rows,
    num_tokens,
    token_programs,
    stride_tokens,
    stride_rows,
    stride_history,
    stride_table,
    width,
    DROPPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first programs process tokens, each of the others one row."""
    program = tl.program_id(0)
    if program < token_programs:
        token = program * TOKENS + tl.arange(0, TOKENS)
        inside = token < num_tokens
        low = rows_of(query_start_ptr, token, num_rows, TOKENS)
        slot = tl.load(slots_ptr + low).to(tl.int64)
        position = tl.load(lengths_ptr + slot) + token - tl.load(query_start_ptr + low)
        ids = tl.load(history_ptr + slot * stride_history + position, mask=inside, other=0)
        in_cache = position
        if DROPPED:
            in_cache -= tl.load(dropped_ptr + slot)
        block = tl.load(
            table_ptr + slot * stride_table + in_cache // BLOCK_SIZE, mask=inside, other=0
        )
        tl.store(token_longs_ptr + token, ids.to(tl.int64), mask=inside)
        tl.store(token_longs_ptr + stride_tokens + token, position.to(tl.int64), mask=inside)
        place = block.to(tl.int64) * BLOCK_SIZE + in_cache % BLOCK_SIZE
        tl.store(token_longs_ptr + 2 * stride_tokens + token, place, mask=inside)
    else:
        row = program - token_programs
        row_slot = tl.load(slots_ptr + row).to(tl.int64)
        end = tl.load(query_start_ptr + row + 1)
        length = tl.load(lengths_ptr + row_slot) + end - tl.load(query_start_ptr + row)
        source = table_ptr + row_slot * stride_table
        target = rows_table_ptr + row.to(tl.int64) * width
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            in_table = column < width
            blocks = tl.load(source + column, mask=in_table, other=0)
            tl.store(target + column, blocks, mask=in_table)
        kv_length = length
        if DROPPED:
            kv_length -= tl.load(dropped_ptr + row_slot)
        tl.store(seq_lens_ptr + row, kv_length)
        tl.store(row_longs_ptr + row, tl.load(sample_slots_ptr + row).to(tl.int64))
        tl.store(row_longs_ptr + stride_rows + row, length.to(tl.int64))
        tl.store(row_longs_ptr + 2 * stride_rows + row, tl.maximum(end - 1, 0).to(tl.int64))


def step_inputs(
    query_start: torch.Tensor,
    slots: torch.Tensor,
    sample_slots: torch.Tensor,
    num_tokens: int,
    lengths: torch.Tensor,
    token_history: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    dropped: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """See `core.nn.operations.Operations.step_inputs`, whose arguments these are.

    → [3, T] int64: input ids, positions, slot mapping; [3, R] int64: slots to sample for, lengths,
    last tokens; lengths of the caches as int32; the rows' block tables [R, columns] int32.
    """
    num_rows, width = slots.shape[0], block_table.shape[1]
    device = slots.device
    # Two numbers are 16 bytes: Triton recompiles a kernel for pointers without this alignment.
    token_longs = torch.empty((3, even(num_tokens)), dtype=torch.int64, device=device)
    row_longs = torch.empty((3, even(num_rows)), dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    rows_table = torch.empty((num_rows, width), dtype=torch.int32, device=device)
    token_programs = triton.cdiv(num_tokens, TOKENS)
    launch(_step_inputs_kernel, (token_programs + num_rows,))(
        token_longs,
        row_longs,
        seq_lens,
        rows_table,
        query_start,
        slots,
        sample_slots,
        lengths,
        dropped,
        token_history,
        block_table,
        num_rows,
        num_tokens,
        token_programs,
        token_longs.stride(0),
        row_longs.stride(0),
        token_history.stride(0),
        block_table.stride(0),
        width,
        DROPPED=dropped is not None,
        BLOCK_SIZE=block_size,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return token_longs[:, :num_tokens], row_longs[:, :num_rows], seq_lens, rows_table


@triton.jit(
    do_not_specialize=["num_rows", "last_slot"],
    do_not_specialize_on_alignment=["slots_ptr", "query_start_ptr"],
)
def _advance_kernel(
    lengths_ptr, slots_ptr, query_start_ptr, num_rows, last_slot, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    inside = inside & (slot < last_slot)
    start = tl.load(query_start_ptr + row, mask=inside, other=0)
    end = tl.load(query_start_ptr + row + 1, mask=inside, other=0)
    length = tl.load(lengths_ptr + slot, mask=inside, other=0)
    tl.store(lengths_ptr + slot, length + end - start, mask=inside)


def advance(lengths: torch.Tensor, slots: torch.Tensor, query_start: torch.Tensor) -> None:
    """See `core.nn.operations.Operations.advance`, whose arguments these are."""
    num_rows = slots.shape[0]
    launch(_advance_kernel, (triton.cdiv(num_rows, ROWS),))(
        lengths,
        slots,
        query_start,
        num_rows,
        lengths.shape[0] - 1,
        ROWS=ROWS,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "stride_out", "stride_rows", "columns"],
    do_not_specialize_on_alignment=["query_start_ptr"],
)
def _slot_mappings_kernel(
    out_ptr,
    table_ptr,
    query_start_ptr,
    positions_ptr,
    num_rows,
    num_tokens,
    stride_out,
    stride_rows,
    columns,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: some tokens in one table of each row. The first table is left out."""
    table = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    row = rows_of(query_start_ptr, token, num_rows, TOKENS).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    at = row * stride_rows + (table + 1) * columns + position // BLOCK_SIZE
    block = tl.load(table_ptr + at, mask=inside, other=0)
    place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(out_ptr + table * stride_out + token, place, mask=inside)


def slot_mappings(
    block_table: torch.Tensor,
    columns: int,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """See `core.nn.operations.Operations.slot_mappings`, whose arguments these are."""
    num_rows, num_tokens = block_table.shape[0], positions.shape[0]
    more = block_table.shape[1] // columns - 1
    out = torch.empty((more, even(num_tokens)), dtype=torch.int64, device=positions.device)
    launch(_slot_mappings_kernel, (triton.cdiv(num_tokens, TOKENS), more))(
        out,
        block_table,
        query_start,
        positions,
        num_rows,
        num_tokens,
        out.stride(0),
        block_table.stride(0),
        columns,
        BLOCK_SIZE=block_size,
        TOKENS=TOKENS,
        num_warps=4,
    )
    return out[:, :num_tokens]


def even(number: int) -> int:
    return number + number % 2


@triton.jit(do_not_specialize_on_alignment=["writes_ptr", "count_ptr"])
def _scatter_kernel(storage_ptr, writes_ptr, count_ptr, WRITES: tl.constexpr):
    offset = tl.program_id(0) * WRITES + tl.arange(0, WRITES)
    inside = offset < tl.load(count_ptr)
    place = tl.load(writes_ptr + 2 * offset, mask=inside, other=0)
    value = tl.load(writes_ptr + 2 * offset + 1, mask=inside, other=0)
    tl.store(storage_ptr + place, value, mask=inside)


def scatter(storage: torch.Tensor, writes: torch.Tensor, count: torch.Tensor) -> None:
    """Set storage[writes[i, 0]] = writes[i, 1] for i < count.

    All int32: storage [any], writes [most, 2], contiguous, count [1].
    """
    launch(_scatter_kernel, (triton.cdiv(writes.shape[0], WRITES),))(
        storage, writes, count, WRITES=WRITES, num_warps=4
    )
