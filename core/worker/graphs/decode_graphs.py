"""Decode steps as recorded graphs: one replay instead of hundreds of launches.

If every row computes one token and samples, only a static int32 array differs. Such steps are
recorded for some numbers of rows, to which batches are padded, on demand or while the device is
idle. Padding rows use a scratch slot and the null block.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...nn.operations import Operations
from ...protocols.models import HiddenStates
from ...step import StepPlan
from ..batch import LogitPlaces, PersistentBatch, StepInputs
from ..sampling.sampler import Sampler
from .endings import Ending, count_run, row_counts, sample_rows, shared_row_counts
from .recorder import Losses, Recorder, Replay
from .static_numbers import StaticNumbers
from .written_tokens import WrittenTokens

logger = logging.getLogger("jackfield.worker")

PADDING_COST = 1 / 1024
"""Time of a row of padding, in steps, roughly: a graph is recorded after some forty steps with a
hundred rows of padding."""
HEADER = 4
"""Numbers after those of rows: of writes, and of tokens that rows share."""
SHARED_COST = 1 / 8
"""What a step loses, in steps, roughly, if each row reads a prefix that all rows share."""


class DecodeKey(NamedTuple):
    """What a graph is recorded for."""

    rows: int
    ending: Ending
    shared: bool = False
    """Whether rows read once what they share (`BatchLayout.shared_prefix`)."""


class DecodeGraphs:
    def __init__(
        self,
        *,
        forward: Callable[[StepInputs], HiddenStates],
        logits: Callable[[HiddenStates, Ending, LogitPlaces], torch.Tensor],
        batch: PersistentBatch,
        sampler: Sampler,
        operations: Operations,
        record: Recorder,
        endings: Sequence[Ending],
        errors: type[Exception],
        in_traffic: bool,
        written: WrittenTokens | None = None,
    ) -> None:
        """`forward`: inputs of R one-token rows → hidden states; `logits`: these → what an ending
        samples from. endings: to record, in order; errors: of recordings, on all ranks;
        in_traffic: whether a launch may first run another step; written: gets each run's tokens,
        besides `outputs`.
        """
        max_num_seqs = batch.num_slots
        self._batch = batch
        self._forward, self._logits = forward, logits
        self._sampler = sampler
        self._record = record
        self._written = written
        self._kinds = endings
        self._counts = row_counts(max_num_seqs)
        self._errors, self._in_traffic = errors, in_traffic
        self._shared_counts = [] if batch.prefixes is None else shared_row_counts(max_num_seqs)
        self._shared_endings = list(endings[:1]) if self._shared_counts else []
        """Recorded in spare time for rows that share a prefix, too: the first, and those of steps
        whose rows did."""
        self._replays: dict[DecodeKey, Replay] = {}
        self._losses = Losses()
        self._inputs = DecodeInputs(batch, operations, max_num_seqs)
        device = batch.device
        self.outputs = sampler.outputs
        """Tokens of the last step, unless it ended with logits."""
        self.logits = torch.empty(0, device=device)
        """[max_num_seqs, vocab_size] Logits of the last step without sampling, or its states,
        [max_num_seqs, hidden_size]; created by the first recording."""
        self._sampling_inputs: dict[DecodeKey, tuple[torch.Tensor, torch.Tensor]] = {}
        """A graph without sampling → slots and lengths, kept so that no other graph reuses their
        memory."""
        self._last: DecodeKey | None = None
        """The last step's graph."""
        self.num_recorded = 0

    def missing(self) -> list[DecodeKey]:
        """Return what to record.

        The largest first, as they share memory, then by halves, then the rest; then logits, and
        last those of rows that share a prefix.
        """
        endings = [ending for ending in self._kinds if ending.samples]
        others = [ending for ending in self._kinds if not ending.samples]
        halves = [n for n in self._counts if n.bit_count() == 1 or n == self._counts[-1]][::-1]
        rest = [n for n in reversed(self._counts) if n not in halves]
        keys = [DecodeKey(n, ending) for part in (halves, rest) for ending in endings for n in part]
        keys += [DecodeKey(n, ending) for ending in others for n in halves + rest]
        for ending in self._shared_endings:
            keys += [DecodeKey(n, ending, shared=True) for n in reversed(self._shared_counts)]
        return [key for key in keys if key not in self._replays]

    @staticmethod
    def is_decode_step(plan: StepPlan) -> bool:
        """Return whether every row computes one token and samples, and no request starts."""
        num_rows = len(plan.slots)
        return (
            not plan.starts
            and num_rows > 0
            and sum(plan.num_tokens) == num_rows
            and all(plan.samples)
        )

    def launch(self, plan: StepPlan, ending: Ending) -> bool:
        """Replay a decode step, with sampling (to `outputs`) or up to `logits` or states.

        Returns False, unchanged, for other steps, or without a graph. Records for logits that were
        not recorded in spare time, and what was missed most: that takes several steps' time.
        """
        shared = self._batch.shared_prefix(plan.slots)
        key = self._recorded(len(plan.slots), ending, shared)
        if key is None or not self._inputs.fill(plan, key.rows, shared if key.shared else 0):
            return False
        self._replays[key]()
        self._last = key
        count_run(ending, self._written)
        return True

    def sampling_inputs(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last step's slots and lengths without sampling, [num_rows] int64."""
        assert self._last is not None, "a step came before"
        slots, lengths = self._sampling_inputs[self._last]
        return slots[:num_rows], lengths[:num_rows]

    def _recorded(self, num_rows: int, ending: Ending, shared: int) -> DecodeKey | None:
        """Return the graph that serves a step with least padding, recording one if enough was
        lost. shared: tokens that rows share."""
        if shared:
            if ending not in self._shared_endings:
                self._shared_endings.append(ending)
            best = DecodeKey(_least(self._shared_counts, num_rows), ending, shared=True)
            key = self._serving(best, self._shared_counts, SHARED_COST)
            if key is not None:
                return key
        best = DecodeKey(_least(self._counts, num_rows), ending)
        key = self._serving(best, self._counts, best.rows * PADDING_COST)
        if key is None and not ending.samples:
            self.record(*best)
            return best
        return key

    def _serving(self, best: DecodeKey, counts: Sequence[int], cost: float) -> DecodeKey | None:
        """Return `best` or the next larger graph, recording it if enough was lost by padding, or
        by what a step without any of these costs."""
        if best in self._replays:
            return best
        able = (best._replace(rows=n) for n in counts if n >= best.rows)
        key = next((each for each in able if each in self._replays), None)
        lost = cost if key is None else (key.rows - best.rows) * PADDING_COST
        if not self._in_traffic or not self._losses.is_due(best, lost):
            return key
        try:
            self.record(*best)
        except self._errors:
            logger.warning("%s cannot be recorded; another serves it", best, exc_info=True)
            return key
        return best

    def record_next(self) -> None:
        """Record one more of those that are missing."""
        if missing := self.missing():
            self.record(*missing[0])

    def record(self, rows: int, ending: Ending, shared: bool = False) -> None:
        began = time.monotonic()
        key = DecodeKey(rows, ending, shared)
        self._inputs.fill_scratch(rows)
        if not self._is_ready(key):
            self._run_once(key)
        try:
            replay = self._record(lambda: self._step(key))
        except RuntimeError:
            logger.debug("%s has to run first", key, exc_info=True)
            self._run_once(key)
            replay = self._record(lambda: self._step(key))
        self._replays[key] = replay
        self.num_recorded += 1
        logger.debug("recorded %s in %.3f s", key, time.monotonic() - began)

    @property
    def row_counts(self) -> list[int]:
        """Return the numbers of rows that are recorded."""
        return [n for n in self._counts if DecodeKey(n, Ending.PLAIN) in self._replays]

    def run_scratch(self, rows: int) -> None:
        """Replay a step of the scratch slot alone."""
        self._inputs.fill_scratch(rows)
        self._replays[DecodeKey(rows, Ending.PLAIN)]()
        count_run(Ending.PLAIN, self._written)

    def _run_once(self, key: DecodeKey) -> None:
        self._step(key)
        count_run(key.ending, self._written)

    def _is_ready(self, key: DecodeKey) -> bool:
        """Whether a step's launches all ran before, so that kernels are compiled and workspaces
        allocated: its rows with another ending, and vice versa.
        """
        return any(
            (each.rows, each.shared) == (key.rows, key.shared) for each in self._replays
        ) and any(each.ending is key.ending for each in self._replays)

    def precompile(self, rows: int) -> None:
        """Run a step of `rows` rows while kernels are only compiled."""
        self._precompile(rows, shared=False)
        if rows in self._shared_counts:
            self._precompile(rows, shared=True)

    def _precompile(self, rows: int, *, shared: bool) -> None:
        self._inputs.fill_scratch(rows)
        inputs = self._inputs.expand(rows, shared)
        # Written by kernels that did not run, but memory addresses that torch would dereference.
        for places in (
            inputs.input_ids, inputs.positions, inputs.sample_slots, inputs.sample_lengths,
            *(part for layout in inputs.layouts for part in layout.places),
        ):  # fmt: skip
            places.zero_()
        hidden = self._forward(inputs)
        for ending in self._kinds:
            if not ending.samples:
                continue
            logits = self._logits(hidden, ending, _places(inputs))
            self._sample(ending, logits, inputs)

    def _step(self, key: DecodeKey) -> None:
        inputs = self._inputs.expand(key.rows, key.shared)
        logits = self._logits(self._forward(inputs), key.ending, _places(inputs))
        if key.ending.samples:
            self._sample(key.ending, logits, inputs)
            return
        if not self.logits.numel():
            self.logits = logits.new_empty(self._counts[-1], logits.shape[1])
        self.logits[: key.rows].copy_(logits)
        self._sampling_inputs[key] = inputs.sample_slots, inputs.sample_lengths

    def _sample(self, ending: Ending, logits: torch.Tensor, inputs: StepInputs) -> None:
        slots, lengths = inputs.sample_slots, inputs.sample_lengths
        sample_rows(self._sampler, ending, logits, slots, lengths, self._written)


def _least(counts: Sequence[int], num_rows: int) -> int:
    """Return the least of ascending numbers that is no less than `num_rows`."""
    return counts[bisect_left(counts, num_rows)]


def _places(inputs: StepInputs) -> LogitPlaces:
    return LogitPlaces(inputs.sample_slots, inputs.sample_lengths)


@dataclass(slots=True)
class _StaticStep:
    """What a step is sent without new blocks, once its rows have their tables."""

    slots: tuple[int, ...]
    rows: int
    """Rows of the graph."""
    shared_prefix: int
    own_slots: np.ndarray
    """[len(slots)] intp"""
    row_of_slot: dict[int, int]
    row_slots: np.ndarray
    """[rows] int32, the scratch slot in rows of padding."""
    numbers: np.ndarray
    row_changes: int = -1
    """`SlotTable.row_changes` when rows had their tables; -1: they have not."""

    @classmethod
    def of(
        cls, slots: tuple[int, ...], rows: int, shared_prefix: int, scratch_slot: int
    ) -> _StaticStep:
        own_slots = np.asarray(slots, dtype=np.intp)
        row_slots = np.full(rows, scratch_slot, dtype=np.int32)
        row_slots[: len(slots)] = own_slots
        numbers = np.zeros(2 * rows + HEADER, dtype=np.int32)
        numbers[:rows] = -1 - row_slots
        numbers[2 * rows + 1] = shared_prefix
        row_of_slot = {slot: row for row, slot in enumerate(slots)}
        return cls(slots, rows, shared_prefix, own_slots, row_of_slot, row_slots, numbers)


class DecodeInputs:
    """Static input of decode graphs: each row's slot and new block, or with several groups or
    drafts block table writes instead; and what rows share.
    """

    def __init__(self, batch: PersistentBatch, operations: Operations, max_rows: int) -> None:
        self._batch = batch
        self._operations = operations
        # Each into the slot's table and the row's. The device cannot tell the column of a new block
        # by a length that the host only bounds.
        listed = batch.num_groups > 1 or batch.num_drafts > 0
        self._most_writes = 2 * batch.num_groups * max_rows if listed else 0
        self._numbers = StaticNumbers(batch, 2 * max_rows + HEADER + 2 * self._most_writes)
        self._query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=batch.device)
        self._query_start_cpu = np.arange(max_rows + 1, dtype=np.int32)
        self._step = _StaticStep.of((), 0, 0, batch.scratch_slot)
        """The last step's."""

    def fill(self, plan: StepPlan, rows: int, shared_prefix: int = 0) -> bool:
        """Send a step's rows; False, unchanged, if a row gets another block than its new token's,
        or another slot gets any.
        """
        table, step = self._batch.table, self._step
        if step.slots != plan.slots or step.rows != rows or step.shared_prefix != shared_prefix:
            step = _StaticStep.of(plan.slots, rows, shared_prefix, self._batch.scratch_slot)
        numbers = step.numbers
        if plan.table_writes and self._most_writes:
            writes = table.row_writes(plan.table_writes)
            if len(writes) > self._most_writes:
                return False
            numbers = np.concatenate([numbers, writes.reshape(-1)])
            numbers[2 * rows] = len(writes)
        elif plan.table_writes:
            numbers = numbers.copy()
            if not self._add_blocks(numbers[rows:], plan, step):
                return False
        if step.row_changes != table.row_changes:
            if numbers is step.numbers:
                numbers = numbers.copy()
            numbers[:rows] = table.take_rows(step.row_slots)
            step.row_changes = table.row_changes
        self._step = step
        table.advance(step.own_slots)
        self._numbers.send(numbers)
        return True

    def _add_blocks(self, blocks: np.ndarray, plan: StepPlan, step: _StaticStep) -> bool:
        """Add a plan's new blocks to those of the rows; False: some are others."""
        table, row_of_slot = self._batch.table, step.row_of_slot
        for write in plan.table_writes:
            slot, block_ids = write.slot, write.block_ids
            if slot not in row_of_slot or len(block_ids) != 1:
                return False
            if write.column != table.next_column(slot):
                return False
            blocks[row_of_slot[slot]] = block_ids[0]
        return True

    def fill_scratch(self, rows: int) -> None:
        numbers = np.zeros(2 * rows + HEADER, dtype=np.int32)
        numbers[:rows] = self._batch.scratch_slot
        # A step that is only recorded copies none.
        self._batch.table.forget_rows()
        self._numbers.send(numbers)

    def expand(self, rows: int, shared: bool = False) -> StepInputs:
        """Compute the inputs of forward pass and sampler on the device. shared: rows read once what
        they share."""
        batch, table = self._batch, self._batch.table
        header = self._numbers.array[2 * rows :]
        if self._most_writes:
            writes = header[HEADER : HEADER + 2 * self._most_writes].view(-1, 2)
            self._operations.scatter(table.storage, writes, header[:1])
        inputs = self._operations.decode_inputs(
            self._numbers.array[: 2 * rows].view(2, rows),
            table.lengths,
            table.token_history,
            table.block_table,
            table.row_tables[:rows],
            batch.block_size,
            **table.compression,
        )
        # Torch reads these, and those of `made` are undefined while kernels are only compiled.
        words = self._numbers.array[:rows]
        slots = inputs.slots
        if batch.max_source_tokens:
            slots = torch.where(words < 0, -1 - words, words)
        return StepInputs(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            layouts=batch.layouts(
                inputs,
                self._query_start[: rows + 1],
                self._query_start_cpu[: rows + 1],
                np.full(rows, batch.max_model_len, dtype=np.int32),
                slots=inputs.slots,
                shared_prefix=header[1:2] if shared else None,
            ),
            source=batch.source_layout(slots, self._query_start, batch.source_bounds(rows)),
            logit_tokens=self._query_start[:rows],
            sample_slots=inputs.slots,
            sample_lengths=inputs.lengths,
            logit_rows=[],
        )
