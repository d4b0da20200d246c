"""How many leading tokens the rows of a step have in the same blocks.

Prefix caching gives requests that begin alike the same blocks. The host follows the tables that
plans write: a slot's is compared with a reference when it is written, so that a step takes a
minimum over its rows, and only if its rows or their beginnings changed. Equal numbers are the same
memory, so a reference is never wrong, but it may be of no use; then another takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..step import StepPlan

COMPARED_TOGETHER = 256
"""Columns of all tables that are compared with a new reference at once."""


class SharedPrefixes:
    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        groups: Sequence[int],
        least_tokens: Callable[[int], int | None],
    ) -> None:
        """groups: those of layers that see all tokens; least_tokens: number of rows → tokens from
        which it pays to read them once; None: never."""
        columns = -(-max_model_len // block_size)
        self._tables = {group: _Tables(num_slots, columns) for group in groups}
        self._block_size = block_size
        self._least_tokens = least_tokens
        self._slots: tuple[int, ...] = ()
        self._tokens: int | None = None
        """What the rows of `_slots` share; None: their tables may have changed."""

    def follow(self, plan: StepPlan) -> None:
        """Note the tables that a plan writes."""
        for start in plan.starts:
            self._tokens = None
            for tables in self._tables.values():
                tables.clear(start.slot)
        for write in plan.table_writes:
            tables_of_group = self._tables.get(write.group)
            if tables_of_group is None:
                continue
            if tables_of_group.write(write.slot, write.column, write.block_ids):
                self._tokens = None

    def tokens(self, slots: tuple[int, ...], lengths: Callable[[], np.ndarray]) -> int:
        """Return how many leading tokens these slots have in the same blocks; 0 if it does not pay
        to read them once. None of them is a slot's last token. lengths: returns `length_bounds` of
        the table, which only grow for slots whose beginnings stay, and are read if one changed."""
        if self._tokens is None or slots != self._slots:
            self._slots, self._tokens = slots, self._shared(slots, lengths)
        return self._tokens

    def _shared(self, slots: tuple[int, ...], lengths: Callable[[], np.ndarray]) -> int:
        least = self._least_tokens(len(slots)) if len(slots) > 1 else None
        if least is None:
            return 0
        places = np.asarray(slots)
        blocks = min(tables.common(places) for tables in self._tables.values())
        # A prompt's chunk of one token may fill a block that one started by the same plan has, too.
        blocks = min(blocks, (int(lengths()[places].min()) - 1) // self._block_size)
        tokens = blocks * self._block_size
        return tokens if tokens >= least else 0


class _Tables:
    """Those of a group, and how far each is the reference."""

    def __init__(self, num_slots: int, columns: int) -> None:
        # No table has the last column.
        self._blocks = np.zeros((num_slots, columns + 1), dtype=np.int32)
        """0: none, as no table of such a group has the null block."""
        self._reference = np.zeros(columns + 1, dtype=np.int32)
        self._same = np.zeros(num_slots, dtype=np.int32)
        """Leading columns of each slot that are the reference's, at least."""

    def clear(self, slot: int) -> None:
        self._blocks[slot] = 0
        self._same[slot] = 0

    def write(self, slot: int, column: int, block_ids: Sequence[int]) -> bool:
        """Return whether the slot's columns that are the reference's may have changed."""
        end = column + len(block_ids)
        if len(block_ids) == 1:  # A row's next block, of which a step may have many.
            self._blocks[slot, column] = block_ids[0]
        else:
            self._blocks[slot, column:end] = block_ids
        if column > self._same[slot]:
            return False
        differs = self._reference[column:end] != block_ids
        self._same[slot] = column + differs.argmax() if differs.any() else end
        return True

    def common(self, slots: np.ndarray) -> int:
        """Return how many leading columns these slots have in common."""
        least = int(self._same[slots].min())
        column = self._blocks[slots, least]
        if column[0] and (column == column[0]).all():
            self._refer(int(slots[0]))
            least = int(self._same[slots].min())
        return least

    def _refer(self, slot: int) -> None:
        """Make a slot's table the reference."""
        self._reference = self._blocks[slot].copy()
        self._same[:] = 0
        slots = np.arange(len(self._blocks))
        for begin in range(0, len(self._reference), COMPARED_TOGETHER):
            part = self._reference[begin : begin + COMPARED_TOGETHER]
            differs = (self._blocks[slots, begin : begin + len(part)] != part) | (part == 0)
            whole = ~differs.any(axis=1)
            self._same[slots] += np.where(whole, len(part), differs.argmax(axis=1))
            slots = slots[whole]
            if not len(slots):
                break
