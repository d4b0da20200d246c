"""The persistent batch: what the device remembers of each slot, and how a plan changes it.

A slot keeps its tokens and its block table on the device from admission to end. A plan is packed
into one int32 array, copied once, and expanded there: token ids are gathered from the history, so
a decode step reads the token that the step before it sampled without the host ever knowing it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..nn.context import BatchLayout
from ..types import StepPlan

STAGING_BUFFERS = 4
"""More than the steps in flight, so that no buffer is rewritten while a copy still reads it."""


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


class PersistentBatch:
    """Per-slot state on the device, with host twins of the counters."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.device = device
        self.num_slots = max_num_seqs
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        # One row more than slots, and one column more than a sequence has: scratch, for padding.
        self.token_history = torch.zeros(
            max_num_seqs + 1, max_model_len + 1, dtype=torch.int32, device=device
        )
        """[max_num_seqs + 1, max_model_len + 1]"""
        self.block_table = torch.zeros(
            max_num_seqs + 1, self.max_blocks + 1, dtype=torch.int32, device=device
        )
        """[max_num_seqs + 1, max_blocks + 1]"""
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self._staging: list[torch.Tensor] = []
        self._next_buffer = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.token_history.nbytes + self.block_table.nbytes

    def apply(self, plan: StepPlan) -> StepInputs:
        """Bring the slots up to date with `plan` and lay out its rows. No synchronisation."""
        slots = np.asarray(plan.slots, dtype=np.int32)
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        for start in plan.starts:
            self.num_computed[start.slot] = start.num_computed_tokens
            self.num_blocks[start.slot] = len(start.block_ids)
            self.num_prompt[start.slot] = start.num_prompt_tokens
        computed = self.num_computed[slots]
        num_rows, num_tokens = len(slots), int(counts.sum())
        query_start = np.zeros(num_rows + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        seq_lens = computed + counts
        sample_rows = np.flatnonzero(np.asarray(plan.samples, dtype=bool)).astype(np.int32)

        appended = self._appended(plan)
        # What kernels read comes first, where the buffer is aligned: Triton compiles a kernel again
        # for a pointer that is not.
        parts = [query_start, slots, computed, sample_rows, *appended]
        for start in plan.starts:
            parts.append(np.asarray(start.token_ids, dtype=np.int32))
            parts.append(np.asarray(start.block_ids, dtype=np.int32))
        on_device = self.upload(parts)

        d_query_start, d_slots, d_computed, d_sample_rows = on_device[:4]
        if appended:
            rows, columns, blocks = on_device[4:7]
            self.block_table[rows.long(), columns.long()] = blocks
        rest = on_device[4 + len(appended) :]
        for number, start in enumerate(plan.starts):
            tokens, blocks = rest[2 * number], rest[2 * number + 1]
            self.token_history[start.slot, : len(tokens)] = tokens
            self.block_table[start.slot, : len(blocks)] = blocks
        self.num_computed[slots] = seq_lens

        d_seq_lens = d_computed + torch.diff(d_query_start)
        row_of_token = torch.repeat_interleave(
            torch.arange(num_rows, device=self.device),
            torch.diff(d_query_start).long(),
            output_size=num_tokens,
        )
        token_slots = d_slots.long()[row_of_token]
        offsets = torch.arange(num_tokens, device=self.device) - d_query_start[row_of_token]
        positions = d_computed[row_of_token] + offsets
        blocks = self.block_table[token_slots, positions // self.block_size].long()
        max_seq_len = int(seq_lens.max())
        table_width = -(-max_seq_len // self.block_size)
        sample_index = d_sample_rows.long()
        return StepInputs(
            input_ids=self.token_history[token_slots, positions].long(),
            positions=positions.long(),
            layout=BatchLayout(
                num_rows=num_rows,
                num_tokens=num_tokens,
                max_query_len=int(counts.max()),
                max_seq_len=max_seq_len,
                query_start=d_query_start,
                seq_lens=d_seq_lens,
                block_table=self.block_table[d_slots.long()][:, :table_width],
                slot_mapping=blocks * self.block_size + positions % self.block_size,
                query_start_cpu=query_start,
                seq_lens_cpu=seq_lens,
            ),
            last_tokens=d_query_start[1:].long()[sample_index] - 1,
            sample_slots=d_slots.long()[sample_index],
            sample_lengths=d_seq_lens.long()[sample_index],
            sample_rows=sample_rows.tolist(),
        )

    def record_sampled(
        self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Put sampled ids where the next step will read them. All [S] int64."""
        self.token_history[slots, positions] = token_ids.int()

    def _appended(self, plan: StepPlan) -> list[np.ndarray]:
        """Growth of block tables as [slots, columns, block ids]; empty when nothing grew."""
        if not plan.appended_blocks:
            return []
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for slot, new in plan.appended_blocks:
            first = int(self.num_blocks[slot])
            rows.extend([slot] * len(new))
            columns.extend(range(first, first + len(new)))
            blocks.extend(new)
            self.num_blocks[slot] = first + len(new)
        return [np.asarray(part, dtype=np.int32) for part in (rows, columns, blocks)]

    def upload(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """One copy for all parts; views of it come back."""
        sizes = [len(part) for part in parts]
        total = sum(sizes)
        if self.device.type == "cpu":
            packed = torch.from_numpy(np.concatenate(parts))
        else:
            staging = self._staging_buffer(total)
            np.concatenate(parts, out=staging.numpy()[:total])
            packed = staging[:total].to(self.device, non_blocking=True)
        return list(torch.split(packed, sizes))

    def _staging_buffer(self, size: int) -> torch.Tensor:
        """The next pinned buffer of the ring, with room for `size` integers."""
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
