"""Sizes and static input of recorded steps with prompts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...nn.context import MixedRows
from ..batch import PersistentBatch, StepInputs, StepRows

MIN_PROMPT_ROWS, MAX_PROMPT_ROWS = 4, 256
"""Prompt rows of a graph, with padding."""
TOKENS_PER_PROMPT_ROW = 8
MAX_WRITES = 1 << 16
"""Most slot writes within a recorded step; more precede it."""


class MixedKey(NamedTuple):
    """Sizes of a graph."""

    decode_rows: int
    """Maximum"""
    tokens: int

    @property
    def prompt_rows(self) -> int:
        """Maximum, with padding."""
        rows = self.tokens // TOKENS_PER_PROMPT_ROW
        return min(max(MIN_PROMPT_ROWS, rows), MAX_PROMPT_ROWS)


class StepShape(NamedTuple):
    """Sizes of a step that determine its graph."""

    decode_rows: int
    prompt_rows: int
    tokens: int


def shape_of(rows: StepRows) -> StepShape:
    longer = np.flatnonzero(rows.query_lens != 1)
    decode_rows = int(longer[0]) if longer.size else len(rows.slots)
    return StepShape(decode_rows, len(rows.slots) - decode_rows, int(rows.query_start[-1]))


class MixedInputs:
    def __init__(self, batch: PersistentBatch, max_rows: int) -> None:
        self._batch = batch
        self._most = max_rows
        stride = -(-(max_rows + 1) // 4) * 4  # Each array begins at a multiple of 16 bytes.
        self._stride = stride
        header = 3 * stride + 4
        self._device_array = torch.zeros(
            header + 2 * MAX_WRITES, dtype=torch.int32, device=batch.device
        )
        array = self._device_array
        self._query_start = array[:stride]
        self._slots = array[stride : 2 * stride]
        self._sample_slots = array[2 * stride : 3 * stride]
        self._bounds = array[3 * stride : 3 * stride + 2]
        self._num_writes = array[3 * stride + 2 : 3 * stride + 3]
        self._shared_prefix = array[3 * stride + 3 : header]
        self._writes = array[header:].view(-1, 2)
        self._header = header
        self.key = MixedKey(0, 0)
        """Sizes of the last step."""

    def fill(self, rows: StepRows, writes: np.ndarray, shape: StepShape, key: MixedKey) -> None:
        """Send a step's rows, padded, and its writes."""
        batch = self._batch
        if len(writes) > MAX_WRITES:
            count = np.asarray([len(writes)], dtype=np.int32)
            device_writes, many = batch.upload([writes.reshape(-1), count])
            batch.operations.scatter(batch.table.storage, device_writes.view(-1, 2), many)
            writes = writes[:0]
        num_rows, stride = len(rows.slots), self._stride
        size = self._header + 2 * len(writes)
        on_cpu = batch.device.type == "cpu"
        staging = torch.empty(size, dtype=torch.int32) if on_cpu else batch.staging(size)
        host = staging.numpy()[:size]
        starts, slots, sample_slots = (host[at * stride : (at + 1) * stride] for at in range(3))
        starts[: num_rows + 1] = rows.query_start
        slots[:num_rows], slots[num_rows:] = rows.slots, batch.scratch_slot
        sample_slots[:num_rows], sample_slots[num_rows:] = rows.sample_slots, batch.scratch_slot
        end, padding = num_rows, key.tokens - shape.tokens
        while padding > 0:
            end += 1
            starts[end] = starts[end - 1] + min(padding, batch.max_model_len)
            padding -= batch.max_model_len
        starts[end + 1 :] = key.tokens
        shared = batch.shared_prefix(tuple(rows.slots[: shape.decode_rows].tolist()))
        numbers = host[3 * stride : self._header]
        numbers[:] = shape.decode_rows, end - shape.decode_rows, len(writes), shared
        if len(writes):
            host[self._header :] = writes.reshape(-1)
        self._device_array[:size].copy_(staging[:size], non_blocking=True)
        self.key = key

    def fill_scratch(self, key: MixedKey) -> None:
        none = np.zeros(0, dtype=np.int32)
        rows = StepRows.of(none, none, none, none)
        self.fill(rows, np.zeros((0, 2), dtype=np.int32), StepShape(0, 0, 0), key)

    def write(self, key: MixedKey) -> None:
        """Apply the writes sent with the rows."""
        batch = self._batch
        batch.operations.scatter(batch.table.storage, self._writes, self._num_writes)

    def expand(self, key: MixedKey, num_rows: int) -> StepInputs:
        """Compute the inputs of forward pass and ending on the device."""
        batch = self._batch
        query_start = self._query_start[: num_rows + 1]
        tensors = batch.step_tensors(
            query_start, self._slots[:num_rows], self._sample_slots[:num_rows], key.tokens
        )
        # One graph for all steps: beside a prompt, the launch for what rows share costs nothing.
        shares = key.decode_rows > 1 and batch.prefixes is not None
        return StepInputs(
            input_ids=tensors.input_ids,
            positions=tensors.positions,
            slots=self._slots[:num_rows],
            layouts=batch.layouts(
                tensors,
                query_start,
                np.zeros(num_rows + 1, dtype=np.int32),
                np.full(num_rows, batch.max_model_len, dtype=np.int32),
                max_query_len=key.tokens,
                slots=self._slots[:num_rows],
                mixed=MixedRows(self._bounds, key.decode_rows, key.prompt_rows),
                shared_prefix=self._shared_prefix if shares else None,
            ),
            source=batch.source_layout(
                self._slots[:num_rows], query_start, batch.source_bounds(key.tokens)
            ),
            logit_tokens=tensors.last_tokens,
            sample_slots=tensors.sample_slots,
            sample_lengths=tensors.lengths,
            logit_rows=[],
        )
