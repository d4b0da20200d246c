"""The slot table: what the device remembers of each slot between steps.

A row per slot: its tokens, its block tables and its length. Everything is in one int32 array, so
that one `Operations.scatter` writes whatever a plan changes. The device's length is exact; the host
keeps a bound of it, to size a step without asking the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..step import StepPlan, TableWrite

ALIGNMENT = 4
"""int32 numbers in 16 bytes."""

NO_WRITES = np.zeros((0, 2), dtype=np.int32)


class SlotTable:
    """Rows of all slots on the device, and twins of their counters on the host."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        """`num_groups`: groups of layers; each has a block table in every slot."""
        self.num_slots = num_slots
        self.num_groups = num_groups
        # One row more than slots, for padding, and one position more than a sequence has, for the
        # token that is sampled after the last.
        rows, positions = num_slots + 1, max_model_len + 1
        columns = -(-max_model_len // block_size)
        if num_groups > 1:
            # Each group's part of a slot's table is aligned.
            columns = _aligned(columns)
        self.columns = columns
        """Columns per group in `block_table`."""
        self._history_start = _aligned(rows)
        self._table_start = self._history_start + _aligned(rows * positions)
        table_end = self._table_start + rows * num_groups * columns
        self.storage = torch.zeros(table_end + 1, dtype=torch.int32, device=device)
        """All columns in one; its last number belongs to no slot."""
        self.lengths = self.storage[:rows]
        """[num_slots + 1] int32: tokens in the cache, those of launched steps included. Each step
        reads where its rows begin, and counts their tokens. 0 in the scratch slot."""
        history = self.storage[self._history_start : self._history_start + rows * positions]
        self.token_history = history.view(rows, positions)
        """[num_slots + 1, max_model_len + 1] int32"""
        self.block_table = self.storage[self._table_start : table_end].view(rows, -1)
        """[num_slots + 1, num_groups * columns] int32: the blocks of each group, and padding
        where there are several."""
        self.length_bounds = np.zeros(num_slots, dtype=np.int32)
        """Upper bounds of `lengths`; equal to them while a step keeps all tokens of its rows."""
        self.num_prompt = np.zeros(num_slots, dtype=np.int32)
        """Tokens of each slot's prompt."""

    @property
    def scratch_slot(self) -> int:
        """The slot that padding uses."""
        return self.num_slots

    @property
    def nbytes(self) -> int:
        """Return the bytes of device memory in use."""
        return self.storage.nbytes

    # ------------------------------------------------------------ writes

    def writes(self, plan: StepPlan) -> np.ndarray:
        """Return what `plan` writes, [N, 2] int32: a place in `storage` and the number there.

        Updates the host's counters of the slots that start.
        """
        if not plan.starts and not plan.table_writes:
            return NO_WRITES
        pieces: list[tuple[int, Sequence[int]]] = []
        positions = self.token_history.shape[1]
        for start in plan.starts:
            slot = start.slot
            self.length_bounds[slot] = start.num_computed_tokens
            self.num_prompt[slot] = start.num_prompt_tokens
            pieces.append((slot, (start.num_computed_tokens,)))
            pieces.append((self._history_start + slot * positions, start.token_ids))
        pieces += self._table_pieces(plan.table_writes)
        return _scattered(pieces)

    def table_writes(self, table_writes: Sequence[TableWrite]) -> np.ndarray:
        """The same as `writes`, for block tables alone: [N, 2] int32."""
        return _scattered(self._table_pieces(table_writes))

    def history_places(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return where tokens are in `storage`. All [N] int."""
        return self._history_start + slots * self.token_history.shape[1] + positions

    def emptied(self, slots: Sequence[int]) -> np.ndarray:
        """Return the writes that set the lengths of these slots to 0, [N, 2] int32."""
        return _scattered([(slot, (0,)) for slot in slots])

    def _table_pieces(self, table_writes: Sequence[TableWrite]) -> list[tuple[int, Sequence[int]]]:
        """Return (first place in `storage`, numbers) for each write."""
        start, columns, groups = self._table_start, self.columns, self.num_groups
        return [
            (start + (write.slot * groups + write.group) * columns + write.column, write.block_ids)
            for write in table_writes
        ]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _scattered(pieces: list[tuple[int, Sequence[int]]]) -> np.ndarray:
    """Flatten (first place, numbers) pairs → [N, 2] int32: a place and the number there."""
    writes = np.empty((sum(len(numbers) for _, numbers in pieces), 2), dtype=np.int32)
    end = 0
    for first, numbers in pieces:
        begin, end = end, end + len(numbers)
        writes[begin:end, 0] = np.arange(first, first + len(numbers))
        writes[begin:end, 1] = numbers
    return writes
