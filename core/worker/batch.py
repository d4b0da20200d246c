"""The persistent batch: device state of each slot, and its update by a plan.

A slot keeps its tokens and its block table on the device from admission to end. A plan is packed
into one int32 array, copied once, and expanded there: token ids are gathered from the history, so a
decode step reads the token that the previous step sampled without a copy to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..nn.context import BatchLayout
from ..nn.operations import DecodeTensors, Operations, StepTensors
from ..step import StepPlan, TableWrite

STAGING_BUFFERS = 4
"""More than the steps in flight, so that no buffer is rewritten while a copy still reads it."""
ALIGNMENT = 4
"""int32 numbers in 16 bytes."""


@dataclass(frozen=True)
class StepInputs:
    """What a forward pass and the sampler need, on the device.

    T = tokens, R = rows, S = rows that sample.
    """

    input_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64"""
    layouts: tuple[BatchLayout, ...]
    """Layout per group of layers; only the block tables differ."""
    last_tokens: torch.Tensor
    """[S] int64: index into T of each sampling row's last token."""
    sample_slots: torch.Tensor
    """[S] int64"""
    sample_lengths: torch.Tensor
    """[S] int64: tokens before the sampled one, which is its position."""
    sample_rows: list[int]
    """[S] The plan's row of each sampling row."""

    @property
    def layout(self) -> BatchLayout:
        """Layout of the first group."""
        return self.layouts[0]


def releasing_all(num_slots: int) -> StepPlan:
    """Return a plan without rows that releases every slot, in use or not."""
    released = tuple(range(num_slots))
    return StepPlan(step=-1, slots=(), num_tokens=(), samples=(), released=released)


@dataclass(frozen=True)
class StepRows:
    """A step's R rows on the host, all int32."""

    slots: np.ndarray
    """[R]"""
    first_positions: np.ndarray
    """[R] of each row's first token"""
    query_start: np.ndarray
    """[R + 1] Row r has tokens query_start[r] .. query_start[r + 1]."""
    sample_slots: np.ndarray
    """[R] The slot again, or the scratch slot where nothing is sampled."""

    @classmethod
    def of(
        cls,
        slots: np.ndarray,
        first_positions: np.ndarray,
        counts: np.ndarray,
        sample_slots: np.ndarray,
    ) -> StepRows:
        """Create the rows from the number of tokens of each."""
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        return cls(slots, first_positions, query_start, sample_slots)

    @property
    def query_lens(self) -> np.ndarray:
        """[R] Tokens of each row."""
        return np.diff(self.query_start)

    @property
    def seq_lens(self) -> np.ndarray:
        """[R] Tokens in the cache once the step has written its own."""
        return self.first_positions + self.query_lens


NO_WRITES = np.zeros((0, 2), dtype=np.int32)


def _scattered(pieces: list[tuple[int, Sequence[int]]]) -> np.ndarray:
    """Flatten (first place, numbers) pairs → [N, 2] int32: a place and the number there."""
    writes = np.empty((sum(len(numbers) for _, numbers in pieces), 2), dtype=np.int32)
    end = 0
    for first, numbers in pieces:
        begin, end = end, end + len(numbers)
        writes[begin:end, 0] = np.arange(first, first + len(numbers))
        writes[begin:end, 1] = numbers
    return writes


class PersistentBatch:
    """Per-slot state on the device, with host twins of the counters."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        operations: Operations | None = None,
        num_groups: int = 1,
    ) -> None:
        """`num_groups`: groups of layers; each has a block table in every slot."""
        self.device = device
        self.operations = operations or Operations()
        self.num_slots = max_num_seqs
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self.num_groups = num_groups
        # One row more than slots, and one column more than a sequence has: scratch, for padding.
        rows, positions, columns = max_num_seqs + 1, max_model_len + 1, self.max_blocks + 1
        if num_groups > 1:
            # Each group's part of a slot's table is aligned.
            columns = -(-columns // ALIGNMENT) * ALIGNMENT
        self._columns = columns
        self._table_start = -(-rows * positions // ALIGNMENT) * ALIGNMENT
        table_end = self._table_start + rows * num_groups * columns
        self.storage = torch.zeros(table_end + 1, dtype=torch.int32, device=device)
        """History and block table in one; its last number belongs to no slot."""
        self.token_history = self.storage[: rows * positions].view(rows, positions)
        """[max_num_seqs + 1, max_model_len + 1]"""
        self.block_table = self.storage[self._table_start : table_end].view(rows, -1)
        """[max_num_seqs + 1, num_groups * columns]: max_blocks columns per group, and padding."""
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self._staging: list[torch.Tensor] = []
        self._next_buffer = 0

    @property
    def scratch_slot(self) -> int:
        """The slot that padding uses."""
        return self.num_slots

    @property
    def nbytes(self) -> int:
        """Return the bytes of device memory in use."""
        return self.storage.nbytes

    # ------------------------------------------------------------ from a plan to rows

    def writes(self, plan: StepPlan) -> np.ndarray:
        """Return what `plan` writes into slots, [N, 2] int32: a place in `storage` and the number
        there.

        Updates the counters of the slots.
        """
        if not plan.starts and not plan.table_writes:
            return NO_WRITES
        pieces: list[tuple[int, Sequence[int]]] = []
        positions = self.token_history.shape[1]
        for start in plan.starts:
            slot = start.slot
            self.num_computed[slot] = start.num_computed_tokens
            self.num_prompt[slot] = start.num_prompt_tokens
            pieces.append((slot * positions, start.token_ids))
        pieces += self._table_pieces(plan.table_writes)
        return _scattered(pieces)

    def table_writes(self, table_writes: Sequence[TableWrite]) -> np.ndarray:
        """The same as `writes`, for block tables alone: [N, 2] int32."""
        return _scattered(self._table_pieces(table_writes))

    def write(self, plan: StepPlan) -> None:
        """Bring the slots up to date with a plan that has no rows."""
        writes = self.writes(plan)
        if len(writes):
            count, sent = self.upload([np.asarray([len(writes)], np.int32), writes.reshape(-1)])
            self.operations.scatter(self.storage, sent.view(-1, 2), count)

    def _table_pieces(self, table_writes: Sequence[TableWrite]) -> list[tuple[int, Sequence[int]]]:
        """Return (first place in `storage`, numbers) for each write."""
        start, columns, groups = self._table_start, self._columns, self.num_groups
        return [
            (start + (write.slot * groups + write.group) * columns + write.column, write.block_ids)
            for write in table_writes
        ]

    def rows(self, plan: StepPlan) -> StepRows:
        """Return the rows of the plan, and count their tokens as computed. Call `writes` before."""
        slots = np.asarray(plan.slots, dtype=np.int32)
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        first_positions = self.num_computed[slots]
        self.num_computed[slots] = first_positions + counts
        samples = np.asarray(plan.samples, dtype=bool)
        sample_slots = np.where(samples, slots, np.int32(self.scratch_slot)).astype(np.int32)
        return StepRows.of(slots, first_positions, counts, sample_slots)

    # ------------------------------------------------------------ from rows to tensors

    def apply(self, plan: StepPlan) -> StepInputs:
        """Bring the slots up to date with `plan` and lay out its rows. No synchronisation."""
        writes = self.writes(plan)
        rows = self.rows(plan)
        sample_rows = np.flatnonzero(np.asarray(plan.samples, dtype=bool)).astype(np.int32)
        return self.lay_out(rows, sample_rows, writes)

    def lay_out(
        self, rows: StepRows, sample_rows: np.ndarray, writes: np.ndarray = NO_WRITES
    ) -> StepInputs:
        """Send the rows of a step, and the writes that must precede their computation."""
        count = np.asarray([len(writes)], dtype=np.int32)
        sent = self.upload([
            rows.query_start, rows.slots, rows.first_positions, rows.sample_slots, sample_rows,
            count, writes.reshape(-1),
        ])  # fmt: skip
        if len(writes):
            self.operations.scatter(self.storage, sent[6].view(-1, 2), sent[5])
        num_rows, num_tokens = len(rows.slots), int(rows.query_start[-1])
        query_start, slots, first_positions, passed_on = sent[:4]
        tensors = self.operations.step_inputs(
            query_start, slots, first_positions, passed_on, num_tokens,
            self.token_history, self.block_table, self.block_size,
        )  # fmt: skip
        sample_slots, lengths, last_tokens = (
            tensors.sample_slots,
            tensors.lengths,
            tensors.last_tokens,
        )
        if len(sample_rows) < num_rows:
            index = sent[4].long()
            sample_slots, lengths, last_tokens = (
                part[index] for part in (sample_slots, lengths, last_tokens)
            )
        return StepInputs(
            input_ids=tensors.input_ids,
            positions=tensors.positions,
            layouts=self.layouts(
                tensors, query_start, rows.query_start, rows.seq_lens, block_size=self.block_size
            ),
            last_tokens=last_tokens,
            sample_slots=sample_slots,
            sample_lengths=lengths,
            sample_rows=sample_rows.tolist(),
        )

    def layouts(
        self,
        made: DecodeTensors | StepTensors,
        query_start: torch.Tensor,
        query_start_cpu: np.ndarray,
        seq_lens_cpu: np.ndarray,
        **bounds: Any,
    ) -> tuple[BatchLayout, ...]:
        """Return the layout of each group, from tensors made on the device. `bounds`: see
        `BatchLayout.of`."""
        count, columns = self.num_groups, self._columns
        places = [made.slot_mapping]
        if count > 1:
            places += self.operations.slot_mappings(
                made.block_table, columns, query_start, made.positions, self.block_size
            )
        return tuple(
            BatchLayout.of(
                query_start=query_start,
                seq_lens=made.seq_lens,
                block_table=made.block_table[:, number * columns : (number + 1) * columns],
                slot_mapping=slot_mapping,
                query_start_cpu=query_start_cpu,
                seq_lens_cpu=seq_lens_cpu,
                group=number,
                **bounds,
            )
            for number, slot_mapping in enumerate(places)
        )

    def record_sampled(
        self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Write sampled ids to the history, where the next step reads them. All [S] int64."""
        self.token_history[slots, positions] = token_ids.int()

    # ------------------------------------------------------------ to the device

    def upload(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy all parts, all int32, to the device in one copy; return views of it."""
        sizes = [len(part) for part in parts]
        total = sum(sizes)
        if self.device.type == "cpu":
            packed = torch.from_numpy(np.concatenate(parts))
        else:
            staging = self.staging(total)
            np.concatenate(parts, out=staging.numpy()[:total])
            packed = staging[:total].to(self.device, non_blocking=True)
        return list(torch.split(packed, sizes))

    def staging(self, size: int) -> torch.Tensor:
        """Return the next pinned buffer of the ring, with room for `size` int32 numbers."""
        if not self._staging:
            self._staging = [
                torch.empty(0, dtype=torch.int32, pin_memory=True) for _ in range(STAGING_BUFFERS)
            ]
        self._next_buffer = (self._next_buffer + 1) % STAGING_BUFFERS
        if self._staging[self._next_buffer].numel() < size:
            self._staging[self._next_buffer] = torch.empty(
                max(size, 16384) * 2, dtype=torch.int32, pin_memory=True
            )
        return self._staging[self._next_buffer]
