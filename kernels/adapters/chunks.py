"""Divides a step's tokens into chunks of one adapter each.

Tokens are sorted by the place of their adapter; in that order a run of one place is cut every
`chunk_tokens`. Up to SORTED tokens by one program, which sorts as well; of more, torch sorts the
keys between the two halves. Memory: a few bytes per token; bound by the latency of a dozen
dependent loads, and of the sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import compile_only, launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

SORTED = 1024
"""Most tokens that one program sorts; tokens at a time of more"""
_NOWHERE = tl.constexpr(0x7FFFFFFF)
"""In place of -1: sorted to the end"""


@triton.jit
def _keys_of(
    token,
    slots_ptr,
    query_start_ptr,
    positions_ptr,
    slot_places_ptr,
    slot_starts_ptr,
    num_tokens,
    num_rows,
    num_slots,
    search_steps,
):
    """Return the place of each token's adapter, or _NOWHERE, above the token, in one number."""
    in_step = token < num_tokens
    # The row is the number of rows that end at or before the token.
    row = tl.zeros(token.shape, tl.int32)
    high = row + num_rows
    for _ in range(search_steps):
        middle = (row + high) // 2
        unsure = row < high
        end = tl.load(query_start_ptr + 1 + middle, mask=unsure & in_step, other=0)
        row = tl.where(unsure & (end <= token), middle + 1, row)
        high = tl.where(unsure & (end > token), middle, high)
    slot = tl.load(slots_ptr + row, mask=in_step & (row < num_rows), other=0)
    slot = tl.where(row < num_rows, slot, num_slots - 1)
    position = tl.load(positions_ptr + token, mask=in_step, other=0)
    begin = tl.load(slot_starts_ptr + slot, mask=in_step, other=0)
    place = tl.load(slot_places_ptr + slot, mask=in_step, other=-1)
    acts = in_step & (position >= begin) & (place >= 0)
    return (tl.where(acts, place, _NOWHERE).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def _later_run(place, begin, other_place, other_begin):
    """Of two pieces in order, return the place at the end of both, and where its run begins."""
    return other_place, tl.where(place == other_place, begin, other_begin)


@triton.jit
def _lay_out(
    keys,
    index,
    places_ptr,
    tokens_ptr,
    num_chunks,
    last_place,
    last_begin,
    chunks,
    CHUNK: tl.constexpr,
):
    """Write the tokens of sorted keys, which come after others: last_place, whose run began at
    last_begin, is the others' last, and they made so many chunks. Return the same three of all."""
    place = (keys >> 32).to(tl.int32)
    used = place != _NOWHERE
    _, begin = tl.associative_scan((place, index), 0, _later_run)
    begin = tl.where(place == last_place, last_begin, begin)
    offset = (index - begin) % CHUNK
    opens = used & (offset == 0)
    chunk = chunks + tl.cumsum(opens.to(tl.int32), axis=0) - 1
    fits = used & (chunk < num_chunks)
    tl.store(places_ptr + chunk, place, mask=fits & (offset == 0))
    token = (keys & 0x7FFFFFFF).to(tl.int32)
    tl.store(tokens_ptr + chunk * CHUNK + offset, token, mask=fits)
    last_place = tl.max(place, axis=0)
    last_begin = tl.max(begin, axis=0)
    return last_place, last_begin, chunks + tl.sum(opens.to(tl.int32), axis=0)


@triton.jit
def _clear(places_ptr, tokens_ptr, num_chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Mark all chunks as not used, and without tokens."""
    for start in range(0, num_chunks * CHUNK, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tl.store(tokens_ptr + entry, -1, mask=entry < num_chunks * CHUNK)
        tl.store(places_ptr + entry, -1, mask=entry < num_chunks)
    # Others of the program's threads write the same entries next.
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_slots", "num_chunks", "search_steps"])
def _chunks_kernel(
    places_ptr,
    tokens_ptr,
    slots_ptr,
    query_start_ptr,
    positions_ptr,
    slot_places_ptr,
    slot_starts_ptr,
    num_tokens,
    num_rows,
    num_slots,
    num_chunks,
    search_steps,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program."""
    index = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _clear(places_ptr, tokens_ptr, num_chunks, CHUNK, BLOCK)
    keys = _keys_of(
        index, slots_ptr, query_start_ptr, positions_ptr, slot_places_ptr, slot_starts_ptr,
        num_tokens, num_rows, num_slots, search_steps,
    )  # fmt: skip
    _lay_out(tl.sort(keys), index, places_ptr, tokens_ptr, num_chunks, -1, 0, 0, CHUNK)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_slots", "search_steps"])
def _keys_kernel(
    keys_ptr,
    slots_ptr,
    query_start_ptr,
    positions_ptr,
    slot_places_ptr,
    slot_starts_ptr,
    num_tokens,
    num_rows,
    num_slots,
    search_steps,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = _keys_of(
        token, slots_ptr, query_start_ptr, positions_ptr, slot_places_ptr, slot_starts_ptr,
        num_tokens, num_rows, num_slots, search_steps,
    )  # fmt: skip
    tl.store(keys_ptr + token, keys, mask=token < num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _lay_out_kernel(
    places_ptr,
    tokens_ptr,
    keys_ptr,
    num_tokens,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program."""
    _clear(places_ptr, tokens_ptr, num_chunks, CHUNK, BLOCK)
    last_place = tl.full([], -1, tl.int32)
    last_begin = tl.full([], 0, tl.int32)
    chunks = tl.full([], 0, tl.int32)
    for start in range(0, num_tokens, BLOCK):
        index = start + tl.arange(0, BLOCK)
        keys = tl.load(keys_ptr + index, mask=index < num_tokens, other=_NOWHERE << 32)
        last_place, last_begin, chunks = _lay_out(
            keys, index, places_ptr, tokens_ptr, num_chunks, last_place, last_begin, chunks, CHUNK
        )


def adapter_chunks(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    slot_places: torch.Tensor,
    slot_starts: torch.Tensor,
    num_chunks: int,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `core.nn.operations.Operations.adapter_chunks` → places, [C] int32, and tokens,
    [C, chunk_tokens] int32. Arguments are contiguous."""
    device, num_tokens, num_rows = positions.device, positions.shape[0], slots.shape[0]
    places = torch.empty(num_chunks, dtype=torch.int32, device=device)
    tokens = torch.empty((num_chunks, chunk_tokens), dtype=torch.int32, device=device)
    if num_chunks == 0:
        return places, tokens
    tables = slots, query_start, positions, slot_places, slot_starts
    sizes = num_tokens, num_rows, slot_places.shape[0]
    search_steps = num_rows.bit_length()
    if num_tokens <= SORTED:
        block = max(triton.next_power_of_2(num_tokens), 32)
        options = pdl_options(device)
        launch(_chunks_kernel, (1,))(
            places,
            tokens,
            *tables,
            *sizes,
            num_chunks,
            search_steps,
            CHUNK=chunk_tokens,
            BLOCK=block,
            PDL=bool(options),
            num_warps=min(max(block // 64, 1), 8),
            **options,
        )
        return places, tokens
    keys = torch.empty(num_tokens, dtype=torch.int64, device=device)
    launch(_keys_kernel, (triton.cdiv(num_tokens, 256),))(
        keys, *tables, *sizes, search_steps, BLOCK=256, num_warps=4
    )
    if not compile_only.get():
        keys = keys.sort().values
    launch(_lay_out_kernel, (1,))(
        places,
        tokens,
        keys,
        num_tokens,
        num_chunks,
        CHUNK=chunk_tokens,
        BLOCK=SORTED,
        num_warps=8,
    )
    return places, tokens
