"""Operations that compute a step's inputs from the slots: a part of `Operations`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DecodeTensors(NamedTuple):
    """A decode step's inputs, R rows. All on the device."""

    slots: torch.Tensor
    """[R] int64"""
    input_ids: torch.Tensor
    """[R] int64"""
    positions: torch.Tensor
    """[R] int64"""
    lengths: torch.Tensor
    """[R] int64: positions + 1"""
    slot_mapping: torch.Tensor
    """[R] int64"""
    seq_lens: torch.Tensor
    """[R] int32: tokens in the cache once the step has written its own"""
    block_table: torch.Tensor
    """[R, columns] int32"""


class StepTensors(NamedTuple):
    """Inputs of a step of ragged rows: R rows, T tokens. All on the device."""

    input_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64"""
    slot_mapping: torch.Tensor
    """[T] int64"""
    sample_slots: torch.Tensor
    """[R] int64"""
    lengths: torch.Tensor
    """[R] int64: tokens of the sequence once the step has computed its own"""
    last_tokens: torch.Tensor
    """[R] int64: index into T; 0 for a row without tokens at the front"""
    seq_lens: torch.Tensor
    """[R] int32: tokens in the cache once the step has written its own"""
    block_table: torch.Tensor
    """[R, columns] int32"""


class InputOperations:
    """The slots' tables (tokens, lengths, blocks) are on the device; a step names its rows."""

    def decode_inputs(
        self,
        packed: torch.Tensor,
        lengths: torch.Tensor,
        token_history: torch.Tensor,
        block_table: torch.Tensor,
        row_tables: torch.Tensor,
        block_size: int,
        dropped: torch.Tensor | None = None,
    ) -> DecodeTensors:
        """Compute the inputs of a decode step of R rows, each at its slot's length; write new
        blocks to its table and to the row's, and add 1 to the lengths.

        packed: [2, R] int32: each row's slot (-1 - slot: `row_tables` has its table but for the new
        block), and the block that it gets for its token (0: it has one); lengths: [slots] int32;
        token_history: [slots, positions] int32; block_table: [slots, columns] int32; row_tables:
        [R, columns] int32, contiguous, which the result has; dropped: [slots] int32, how many
        tokens fewer a slot's cache has than its length says (given with KV compression; None:
        none). Padding rows share the last slot, whose length stays 0.
        """
        words, new_blocks = packed[0].long(), packed[1]
        kept = words < 0
        slots = torch.where(kept, -1 - words, words)
        positions = lengths[slots].long()
        places = positions if dropped is None else positions - dropped[slots]
        own = (slots, places // block_size)
        blocks = torch.where(new_blocks > 0, new_blocks, block_table[own])
        block_table.index_put_(own, blocks)
        row_tables.copy_(torch.where(kept[:, None], row_tables, block_table[slots]))
        row_tables.scatter_(1, own[1][:, None], blocks[:, None])
        lengths.index_add_(0, slots, (slots < lengths.shape[0] - 1).int())
        return DecodeTensors(
            slots=slots,
            input_ids=token_history[slots, positions].long(),
            positions=positions,
            lengths=positions + 1,
            slot_mapping=blocks.long() * block_size + places % block_size,
            seq_lens=places.int() + 1,
            block_table=row_tables,
        )

    def step_inputs(
        self,
        query_start: torch.Tensor,
        slots: torch.Tensor,
        sample_slots: torch.Tensor,
        num_tokens: int,
        lengths: torch.Tensor,
        token_history: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        dropped: torch.Tensor | None = None,
    ) -> StepTensors:
        """Compute the inputs of a step of R ragged rows, each from its slot's length on.

        query_start: [R + 1] int32, row r's tokens are query_start[r] .. query_start[r + 1], and
        rows without tokens come last; slots: [R] int32, each row's slot; sample_slots: [R] int32,
        returned as int64; num_tokens: T, the last of query_start; lengths: [slots] int32;
        token_history: [slots, positions] int32; block_table: [slots, columns] int32; dropped:
        [slots] int32, as for `decode_inputs`.
        """
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
        rows = torch.searchsorted(query_start[1:].contiguous(), tokens, right=True)
        slot_of_row = slots.long()
        slot_of_token = slot_of_row[rows]
        first_positions = lengths[slot_of_row]
        positions = (first_positions[rows] + tokens - query_start[rows]).long()
        ends = query_start[1:]
        all_lengths = first_positions + ends - query_start[:-1]
        places, seq_lens = positions, all_lengths
        if dropped is not None:
            places = positions - dropped[slot_of_token]
            seq_lens = all_lengths - dropped[slot_of_row]
        blocks = block_table[slot_of_token, places // block_size].long()
        return StepTensors(
            input_ids=token_history[slot_of_token, positions].long(),
            positions=positions,
            slot_mapping=blocks * block_size + places % block_size,
            sample_slots=sample_slots.long(),
            lengths=all_lengths.long(),
            last_tokens=(ends - 1).clamp(min=0).long(),
            seq_lens=seq_lens,
            block_table=block_table[slot_of_row],
        )

    def advance(
        self, lengths: torch.Tensor, slots: torch.Tensor, query_start: torch.Tensor
    ) -> None:
        """Add the tokens of each of R rows to its slot's length, but nothing to the last slot's,
        which padding rows share.

        All int32: lengths [slots], slots [R], query_start [R + 1], as for `step_inputs`.
        """
        counts = query_start[1:] - query_start[:-1]
        lengths.index_add_(0, slots, counts * (slots < lengths.shape[0] - 1))

    def slot_mappings(
        self,
        block_table: torch.Tensor,
        columns: int,
        query_start: torch.Tensor,
        positions: torch.Tensor,
        block_size: int,
    ) -> torch.Tensor:
        """Compute the slot mappings of a step's tokens in the tables after the first of G per row.

        block_table: [R, G * columns] int32, contiguous, a row's tables one after another;
        query_start: [R + 1] int32, rows without tokens last; positions: [T] int64, of each token in
        its row → [G - 1, T] int64: block * block_size + offset
        """
        tokens = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        rows = torch.searchsorted(query_start[1:].contiguous(), tokens, right=True)
        tables = block_table.view(block_table.shape[0], -1, columns)[:, 1:].transpose(0, 1)
        blocks = tables[:, rows, positions // block_size].long()
        return blocks * block_size + positions % block_size

    def scatter(self, storage: torch.Tensor, writes: torch.Tensor, count: torch.Tensor) -> None:
        """Set storage[writes[i, 0]] = writes[i, 1] for i < count; `storage`'s last may change.

        All int32: storage [any], writes [most, 2], contiguous, count [1]. Indices are different.
        """
        index = torch.arange(writes.shape[0], device=writes.device)
        places = torch.where(index < count, writes[:, 0].long(), storage.shape[0] - 1)
        storage.index_copy_(0, places, writes[:, 1])
