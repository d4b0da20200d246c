"""The slot table: the device's memory of slots between steps.

Per slot: tokens, block tables, length, in one int32 array, so that one `Operations.scatter` applies
a plan. The device's length is exact; the host has a bound for sizing steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

import numpy as np
import torch

from ..parts.kv_compression import Compaction, LevelMoves
from ..parts.speculation import Rejection
from ..step import StepPlan, TableWrite

ALIGNMENT = 4
"""int32 numbers in 16 bytes."""

NO_WRITES = np.zeros((0, 2), dtype=np.int32)


class SlotTable:
    """All slots' rows on the device, and host twins of counters."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        compacts: bool = False,
        max_source_tokens: int = 0,
        num_drafts: int = 0,
        num_levels: int = 0,
    ) -> None:
        """`num_groups`: of layers; each has a block table per slot. `compacts`: plans may have
        compactions. `max_source_tokens`: of sources, which have one more table; 0: none.
        `num_drafts`: most per row. `num_levels`: to which tokens of caches move.
        """
        self.num_slots, self.num_drafts = num_slots, num_drafts
        has_sources = max_source_tokens > 0
        num_tables = self.num_tables = num_groups + has_sources
        # One row more than slots, for padding, and one position more than a sequence has, for the
        # token that is sampled after the last, and drafts after that.
        rows, positions = num_slots + 1, max_model_len + 1 + num_drafts
        columns = -(-max(max_model_len, max_source_tokens) // block_size)
        if num_tables > 1:
            # Each part of a slot's table is aligned.
            columns = _aligned(columns)
        self.columns = columns
        """Columns per table."""
        self._history_start = _aligned(rows)
        self._table_start = self._history_start + _aligned(rows * positions)
        table_end = self._table_start + rows * num_tables * columns
        self._row_start = _aligned(table_end)
        end = self._row_start + num_slots * num_tables * columns
        self._dropped_start = _aligned(end)
        size = self._dropped_start + rows if compacts else end
        self._source_start = _aligned(size)
        size = source_end = self._source_start + rows if has_sources else size
        self._levels_start = _aligned(size)
        size = self._levels_start + rows * num_levels if num_levels else size
        self._block_size = block_size
        self.storage = torch.zeros(size + 1, dtype=torch.int32, device=device)
        """All columns in one; the last number belongs to no slot."""
        self.lengths = self.storage[:rows]
        """[num_slots + 1] int32: computed tokens, launched steps included; 0 in the scratch
        slot."""
        dropped = self.storage[self._dropped_start : self._dropped_start + rows]
        self.dropped = dropped if compacts else None
        """[num_slots + 1] int32: computed tokens dropped by compactions; None without any."""
        self.source_lengths = self.storage[self._source_start : source_end] if has_sources else None
        """[num_slots + 1] int32: source tokens; None without sources."""
        levels = self.storage[self._levels_start : size].view(rows, -1) if num_levels else None
        self.level_tokens = levels
        """[num_slots + 1, num_levels] int32: tokens of each level of a cache; None without any."""
        self.num_levels = num_levels
        self.num_source = np.zeros(rows, dtype=np.int32)
        """[num_slots + 1] The same on the host, set before `writes`."""
        self.num_dropped = np.zeros(rows, dtype=np.int32)
        """[num_slots + 1] The same on the host."""
        history = self.storage[self._history_start : self._history_start + rows * positions]
        self.token_history = history.view(rows, positions)
        """[num_slots + 1, max_model_len + 1 + num_drafts] int32"""
        self.block_table = self.storage[self._table_start : table_end].view(rows, -1)
        """[num_slots + 1, num_tables * columns] int32: each group's blocks, the source's, and
        padding."""
        self.row_tables = self.storage[self._row_start : end].view(num_slots, -1)
        """[num_slots, num_tables * columns] int32: tables by row, for recorded decode steps;
        unchanged rows get only new blocks."""
        self._row_of = np.full(num_slots + 1, -1, dtype=np.int32)
        """Slot → its row in `row_tables`, if `_slot_of` agrees, or -1."""
        self._slot_of = np.full(num_slots, -1, dtype=np.int32)
        self.row_changes = 0
        """How often rows of `row_tables` changed in more than new blocks."""
        self._length_bounds = np.zeros(num_slots, dtype=np.int32)
        self._advancing = np.zeros(0, dtype=np.intp)
        """Slots whose bounds lag, by `_num_advanced`."""
        self._num_advanced = 0
        self.num_prompt = np.zeros(num_slots, dtype=np.int32)

    @property
    def scratch_slot(self) -> int:
        return self.num_slots

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def compression(self) -> dict[str, torch.Tensor]:
        """Return the KV compression option of `Operations.decode_inputs` and `step_inputs`."""
        return {} if self.dropped is None else {"dropped": self.dropped}

    def group_table(self, group: int) -> torch.Tensor:
        """Return a group's part of `block_table`, [num_slots + 1, columns]."""
        return self.block_table[:, group * self.columns : (group + 1) * self.columns]

    @property
    def length_bounds(self) -> np.ndarray:
        """[num_slots] int32: upper bounds of `lengths`, exact but for undecided drafts."""
        self._count_advances()
        return self._length_bounds

    def advance(self, slots: np.ndarray) -> None:
        """Count a token of each of these slots, [N] intp, an array that stays as it is. Steps with
        the same one are added up until bounds are read.
        """
        if slots is not self._advancing:
            self._count_advances()
            self._advancing = slots
        self._num_advanced += 1

    def _count_advances(self) -> None:
        if self._num_advanced:
            self._length_bounds[self._advancing] += self._num_advanced
            self._num_advanced = 0

    def next_column(self, slot: int) -> int:
        """Return the block column of the slot's next token."""
        length = self.length_bounds.item(slot) - self.num_dropped.item(slot)
        return length // self._block_size

    # ------------------------------------------------------------ writes

    def writes(self, plan: StepPlan) -> np.ndarray:
        """Return `plan`'s writes, [N, 2] int32: place in `storage`, number.

        Updates host counters of started slots.
        """
        if not plan.starts and not plan.table_writes:
            return NO_WRITES
        pieces: list[tuple[int, Sequence[int]]] = []
        positions = self.token_history.shape[1]
        for start in plan.starts:
            slot = start.slot
            self.length_bounds[slot] = start.num_computed_tokens
            self.num_prompt[slot] = start.num_prompt_tokens
            self._leave_row(slot)
            pieces.append((slot, (start.num_computed_tokens,)))
            pieces.append((self._history_start + slot * positions, start.token_ids))
            if self.source_lengths is not None:
                pieces.append((self._source_start + slot, (int(self.num_source[slot]),)))
            if self.dropped is not None:
                self.num_dropped[slot] = 0
                pieces.append((self._dropped_start + slot, (0,)))
            if self.num_levels:
                pieces.append(self._level_piece(slot, (0,) * self.num_levels))
        for write in plan.table_writes:
            self._leave_row(write.slot)
            pieces.append((self._place(self._table_start, write.slot, write), write.block_ids))
        return _scattered(pieces)

    def compacted(self, compactions: Sequence[Compaction]) -> np.ndarray:
        """Return compactions' writes, likewise, counting dropped tokens."""
        pieces: list[tuple[int, Sequence[int]]] = []
        for compaction in compactions:
            dropped = compaction.num_tokens - compaction.kept
            num_dropped = int(self.num_dropped[compaction.slot]) + dropped
            pieces += self._moved(compaction.slot, num_dropped, compaction.tables)
        return _scattered(pieces)

    def leveled(self, moves: Sequence[LevelMoves]) -> np.ndarray:
        """Return writes of moves between levels, likewise."""
        pieces: list[tuple[int, Sequence[int]]] = []
        for each in moves:
            pieces += self._moved(each.slot, each.num_dropped, each.tables)
            pieces.append(self._level_piece(each.slot, each.level_tokens))
        return _scattered(pieces)

    def _moved(
        self, slot: int, num_dropped: int, tables: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, Sequence[int]]]:
        """Return the writes of a slot whose cache has other blocks."""
        assert self.dropped is not None, "a compaction, without KV compression"
        self._leave_row(slot)
        self.num_dropped[slot] = num_dropped
        pieces: list[tuple[int, Sequence[int]]] = [(self._dropped_start + slot, (num_dropped,))]
        for group, block_ids in enumerate(tables):
            whole = TableWrite(slot, group, 0, block_ids)
            pieces.append((self._place(self._table_start, slot, whole), block_ids))
        return pieces

    def _level_piece(self, slot: int, tokens: Sequence[int]) -> tuple[int, Sequence[int]]:
        return self._levels_start + slot * self.num_levels, tokens

    def shorten(self, rejections: Sequence[Rejection]) -> None:
        """Take rejected drafts out of the bounds."""
        for rejection in rejections:
            self.length_bounds[rejection.slot] -= rejection.num_tokens

    def row_writes(self, table_writes: Sequence[TableWrite]) -> np.ndarray:
        """As `writes`, for block tables with `row_tables`. Call `take_rows` after sending."""
        pieces: list[tuple[int, Sequence[int]]] = []
        for write in table_writes:
            pieces.append((self._place(self._table_start, write.slot, write), write.block_ids))
            row = self._row_of[write.slot]
            if row >= 0 and self._slot_of[row] == write.slot:
                pieces.append((self._place(self._row_start, int(row), write), write.block_ids))
        return _scattered(pieces)

    def take_rows(self, slots: np.ndarray) -> np.ndarray:
        """Give the first rows of `row_tables` to slots [R] int32. Returns [R] int32: -1 - slot if
        the row has its table, else the slot to copy.
        """
        occupants = self._slot_of[: len(slots)]
        rows = np.arange(len(slots), dtype=np.int32)
        kept = (occupants == slots) & ((self._row_of[slots] == rows) | (slots == self.scratch_slot))
        occupants[:] = slots
        self._row_of[slots] = rows
        self.row_changes += 1
        return np.where(kept, -1 - slots, slots)

    def _leave_row(self, slot: int) -> None:
        self._row_of[slot] = -1
        self.row_changes += 1

    def forget_rows(self) -> None:
        """Invalidate `row_tables`."""
        self._slot_of[:] = -1
        self.row_changes += 1

    def history_places(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return tokens' places in `storage`; all [N] int."""
        return self._history_start + slots * self.token_history.shape[1] + positions

    def emptied(self, slots: Sequence[int]) -> np.ndarray:
        """Return writes that zero these slots' lengths, [N, 2] int32."""
        return _scattered([(slot, (0,)) for slot in slots])

    def _place(self, start: int, row: int, write: TableWrite) -> int:
        """Return the place of a write's first block in tables from `start`."""
        return start + (row * self.num_tables + write.group) * self.columns + write.column


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _scattered(pieces: list[tuple[int, Sequence[int]]]) -> np.ndarray:
    """Flatten (first place, numbers) pairs → [N, 2] int32."""
    writes = np.empty((sum(len(numbers) for _, numbers in pieces), 2), dtype=np.int32)
    end = 0
    for first, numbers in pieces:
        begin, end = end, end + len(numbers)
        writes[begin:end, 0] = np.arange(first, first + len(numbers))
        # numpy would first look for a type that all these integers have in common.
        writes[begin:end, 1] = np.frombuffer(pack(f"{end - begin}i", *numbers), dtype=np.int32)
    return writes
