"""The persistent batch: what the device remembers of each slot, and how a plan changes it.

A slot keeps its tokens and its block table on the device from admission to end. A plan is packed
into one int32 array, copied once, and expanded there: token ids are gathered from the history, so
a decode step reads the token that the step before it sampled without the host ever knowing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..nn.context import BatchLayout
from ..nn.operations import Operations
from ..types import StepPlan

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
    layout: BatchLayout
    last_tokens: torch.Tensor
    """[S] int64: index into T of each sampling row's last token."""
    sample_slots: torch.Tensor
    """[S] int64"""
    sample_lengths: torch.Tensor
    """[S] int64: tokens before the sampled one, which is its position."""
    sample_rows: list[int]
    """[S] The plan's row of each sampling row."""


def releasing_all(num_slots: int) -> StepPlan:
    """A plan without rows that releases every slot, taken or not."""
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
        """From the number of tokens of each row."""
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
    ) -> None:
        self.device = device
        self.operations = operations or Operations()
        self.num_slots = max_num_seqs
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        # One row more than slots, and one column more than a sequence has: scratch, for padding.
        rows, positions, columns = max_num_seqs + 1, max_model_len + 1, self.max_blocks + 1
        self._table_start = -(-rows * positions // ALIGNMENT) * ALIGNMENT
        table_end = self._table_start + rows * columns
        self.storage = torch.zeros(table_end + 1, dtype=torch.int32, device=device)
        """History and block table in one; its last number belongs to no slot."""
        self.token_history = self.storage[: rows * positions].view(rows, positions)
        """[max_num_seqs + 1, max_model_len + 1]"""
        self.block_table = self.storage[self._table_start : table_end].view(rows, columns)
        """[max_num_seqs + 1, max_blocks + 1]"""
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self._staging: list[torch.Tensor] = []
        self._next_buffer = 0

    @property
    def scratch_slot(self) -> int:
        """The slot that padding uses."""
        return self.num_slots

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.storage.nbytes

    # ------------------------------------------------------------ from a plan to rows

    def writes(self, plan: StepPlan) -> np.ndarray:
        """What `plan` puts into slots, [N, 2] int32: a place in `storage` and the number there.

        The slots' counters are brought up to date.
        """
        if not plan.starts and not plan.appended_blocks:
            return NO_WRITES
        pieces: list[tuple[int, Sequence[int]]] = []
        positions, columns = self.token_history.shape[1], self.block_table.shape[1]
        for start in plan.starts:
            slot = start.slot
            self.num_computed[slot] = start.num_computed_tokens
            self.num_blocks[slot] = len(start.block_ids)
            self.num_prompt[slot] = start.num_prompt_tokens
            pieces.append((slot * positions, start.token_ids))
            pieces.append((self._table_start + slot * columns, start.block_ids))
        for slot, blocks in plan.appended_blocks:
            first = self._table_start + slot * columns + int(self.num_blocks[slot])
            pieces.append((first, blocks))
            self.num_blocks[slot] += len(blocks)
        writes = np.empty((sum(len(numbers) for _, numbers in pieces), 2), dtype=np.int32)
        end = 0
        for first, numbers in pieces:
            begin, end = end, end + len(numbers)
            writes[begin:end, 0] = np.arange(first, first + len(numbers))
            writes[begin:end, 1] = numbers
        return writes

    def rows(self, plan: StepPlan) -> StepRows:
        """The plan's rows, whose tokens count as computed from here on. Call `writes` before."""
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
        """Send the rows of a step, and what is to be written before they are computed."""
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
        seq_lens = rows.seq_lens
        max_seq_len = int(seq_lens.max())
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
            layout=BatchLayout(
                num_rows=num_rows,
                num_tokens=num_tokens,
                max_query_len=int(rows.query_lens.max()),
                max_seq_len=max_seq_len,
                query_start=query_start,
                seq_lens=tensors.seq_lens,
                block_table=tensors.block_table[:, : -(-max_seq_len // self.block_size)],
                slot_mapping=tensors.slot_mapping,
                query_start_cpu=rows.query_start,
                seq_lens_cpu=seq_lens,
            ),
            last_tokens=last_tokens,
            sample_slots=sample_slots,
            sample_lengths=lengths,
            sample_rows=sample_rows.tolist(),
        )

    def record_sampled(
        self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Put sampled ids where the next step will read them. All [S] int64."""
        self.token_history[slots, positions] = token_ids.int()

    # ------------------------------------------------------------ to the device

    def upload(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """One copy for all parts, all int32; views of it come back."""
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
        """The next pinned buffer of the ring, with room for `size` int32 numbers."""
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
