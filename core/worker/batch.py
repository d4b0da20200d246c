"""The persistent batch: from a plan to a forward pass's inputs.

A slot's tokens, block tables and length stay on the device (`SlotTable`). A plan is packed into one
int32 array, copied once and expanded there: token ids come from the history, so a decode step reads
the previous step's tokens without a copy to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..cache.level_options import LevelFormat
from ..nn.context import BatchLayout, CacheLevels
from ..nn.operations import Operations
from ..nn.step_operations.inputs import DecodeTensors, StepTensors
from ..step import StepPlan
from .shared_prefixes import SharedPrefixes
from .slot_table import NO_WRITES, SlotTable

STEPS_IN_FLIGHT = 2
"""Steps launched before the first result."""
UPLOADS_OF_STEP = 4
"""Most uploads of a step: compactions or sources, recorded inputs, long prompts, rows."""


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a forward pass and the sampler, on the device.

    T = tokens, R = rows of the plan, L = rows of logits.
    """

    input_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64"""
    slots: torch.Tensor
    """[R] Each row's slot."""
    layouts: tuple[BatchLayout, ...]
    """Per group of layers; only block tables differ."""
    source: BatchLayout | None
    """Attention to sources, with a row per token; None without sources."""
    logit_tokens: torch.Tensor
    """[L] int64: index into T of each position with logits."""
    sample_slots: torch.Tensor
    """[L] int64"""
    sample_lengths: torch.Tensor
    """[L] int64: tokens before each logit's token, i.e. its position."""
    logit_rows: list[int]
    """[L] Rows of the plan, any number of times each. Empty in recorded steps: row r of the logits
    is row r of the plan."""

    @property
    def layout(self) -> BatchLayout:
        return self.layouts[0]


def releasing_all(num_slots: int) -> StepPlan:
    """Return a plan without rows that releases every slot."""
    released = tuple(range(num_slots))
    return StepPlan(step=-1, slots=(), num_tokens=(), samples=(), released=released)


@dataclass(frozen=True)
class StepRows:
    """R rows on the host, all int32."""

    slots: np.ndarray
    """[R]"""
    first_positions: np.ndarray
    """[R] First token's position; upper bounds (`SlotTable.length_bounds`)."""
    query_start: np.ndarray
    """[R + 1] Row r has tokens query_start[r] .. query_start[r + 1]."""
    sample_slots: np.ndarray
    """[R] The slot, or the scratch slot if nothing is sampled."""

    @classmethod
    def of(
        cls,
        slots: np.ndarray,
        first_positions: np.ndarray,
        counts: np.ndarray,
        sample_slots: np.ndarray,
    ) -> StepRows:
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        return cls(slots, first_positions, query_start, sample_slots)

    @property
    def query_lens(self) -> np.ndarray:
        """[R] Tokens of each row."""
        return np.diff(self.query_start)

    @property
    def decode_slots(self) -> tuple[int, ...]:
        """The slots of the leading rows of one token."""
        longer = np.flatnonzero(self.query_lens != 1)
        return tuple(self.slots[: longer[0] if longer.size else None].tolist())

    @property
    def seq_lens(self) -> np.ndarray:
        """[R] Cached tokens after the step."""
        return self.first_positions + self.query_lens


class LogitPlaces(NamedTuple):
    """Whose logits are computed, on the device: N rows of hidden states."""

    slots: torch.Tensor
    """[N] int32 or int64"""
    lengths: torch.Tensor
    """[N] int64: tokens up to the row's own, which is at the position before."""
    slots_host: Sequence[int] | None = None
    """[N] As `slots`, in steps that are launched."""
    positions_host: np.ndarray | None = None
    """[N] Positions of prompt tokens; None: each is the last of its sequence."""


class LogitRows(NamedTuple):
    """Positions with logits: any number per row. On the host, [L] int32."""

    rows: np.ndarray
    """The plan's row of each."""
    tokens: np.ndarray
    """Index into the step's tokens."""

    @classmethod
    def sampled(cls, rows: StepRows, samples: Sequence[bool]) -> LogitRows:
        sampling = np.flatnonzero(np.asarray(samples, dtype=bool)).astype(np.int32)
        return cls(sampling, rows.query_start[1:][sampling] - 1)

    @classmethod
    def verifying(
        cls, rows: StepRows, samples: Sequence[bool], num_drafts: Sequence[int]
    ) -> LogitRows:
        """Return the last position of each sampling row, and one more before it per draft."""
        last = cls.sampled(rows, samples)
        counts = np.asarray(num_drafts, dtype=np.int32)[last.rows] + 1
        ends = np.cumsum(counts, dtype=np.int32)
        back = np.repeat(ends, counts) - 1 - np.arange(counts.sum(), dtype=np.int32)
        return cls(np.repeat(last.rows, counts), np.repeat(last.tokens, counts) - back)

    @classmethod
    def leading(cls, rows: StepRows, which: Sequence[int], counts: Sequence[int]) -> LogitRows:
        """Return the first `counts` positions of some rows."""
        numbers = np.asarray(counts, dtype=np.int32)
        starts = rows.query_start[np.asarray(which, dtype=np.int32)]
        before = np.cumsum(numbers, dtype=np.int32) - numbers
        tokens = np.arange(numbers.sum(), dtype=np.int32) + np.repeat(starts - before, numbers)
        return cls(np.repeat(np.asarray(which, dtype=np.int32), numbers), tokens)


class PersistentBatch:
    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        operations: Operations | None = None,
        num_groups: int = 1,
        compacts: bool = False,
        levels: tuple[LevelFormat, ...] = (),
        has_sources: bool = False,
        source_tokens: int = 0,
        num_drafts: int = 0,
        steps_in_flight: int = STEPS_IN_FLIGHT,
        max_tokens: int = 0,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """`max_tokens`: of a step. `num_groups`: of layers; each has a block table per slot.
        `compacts`: caches lose tokens. `levels`: to which tokens move. `has_sources`: layers attend
        to sources, too, of at most `source_tokens` (0: `max_model_len`). `num_drafts`: most per
        row. `prefixes`: None if it never matters what rows share.
        """
        self.device = device
        self.operations = operations or Operations()
        self.num_slots = max_num_seqs
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.num_groups = num_groups
        self.max_source_tokens = (source_tokens or max_model_len) if has_sources else 0
        self.num_drafts = num_drafts
        self.max_tokens = max_tokens
        self.prefixes = prefixes
        self.table = SlotTable(
            num_slots=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            device=device,
            num_groups=num_groups,
            compacts=compacts,
            max_source_tokens=self.max_source_tokens,
            num_drafts=num_drafts,
            num_levels=len(levels),
        )
        self._levels = None
        if self.table.level_tokens is not None:
            self._levels = CacheLevels(levels, self.table.level_tokens)
        self._staging: list[torch.Tensor] = []
        self.num_staging = UPLOADS_OF_STEP * steps_in_flight + 1
        """More than the uploads in flight, so that no buffer is rewritten during its copy."""
        self._next_buffer = 0

    @property
    def scratch_slot(self) -> int:
        return self.num_slots

    # ------------------------------------------------------------ from a plan to rows

    def write(self, plan: StepPlan) -> None:
        """Update the slots from a plan, without its rows."""
        self.send_writes(self.table.writes(plan))

    def send_writes(self, writes: np.ndarray) -> None:
        """Write [N, 2] int32, a place in the slot table's storage and the number."""
        if len(writes):
            count, device_writes = self.upload(
                [np.asarray([len(writes)], np.int32), writes.reshape(-1)]
            )
            self.operations.scatter(self.table.storage, device_writes.view(-1, 2), count)

    def rows(self, plan: StepPlan) -> StepRows:
        """Return the plan's rows, counted in the host's bounds, after `SlotTable.writes`."""
        slots = np.asarray(plan.slots, dtype=np.int32)
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        first_positions = self.table.length_bounds[slots]
        self.table.length_bounds[slots] = first_positions + counts
        samples = np.asarray(plan.samples, dtype=bool)
        sample_slots = np.where(samples, slots, np.int32(self.scratch_slot)).astype(np.int32)
        return StepRows.of(slots, first_positions, counts, sample_slots)

    def shared_prefix(self, slots: tuple[int, ...]) -> int:
        """Return how many leading tokens rows of one token share that are to be read once."""
        if self.prefixes is None:
            return 0
        return self.prefixes.tokens(slots, lambda: self.table.length_bounds)

    # ------------------------------------------------------------ from rows to tensors

    def apply(self, plan: StepPlan) -> StepInputs:
        """Update the slots, and lay out the rows. No synchronisation."""
        writes = self.table.writes(plan)
        rows = self.rows(plan)
        return self.lay_out(rows, LogitRows.sampled(rows, plan.samples), writes)

    def lay_out(
        self, rows: StepRows, logits: LogitRows, writes: np.ndarray = NO_WRITES
    ) -> StepInputs:
        """Send a step's rows, and the writes that precede them."""
        count = np.asarray([len(writes)], dtype=np.int32)
        shared = self.shared_prefix(rows.decode_slots) if self.prefixes is not None else 0
        sent = self.upload([
            rows.query_start, rows.slots, rows.sample_slots, count, logits.rows, logits.tokens,
            writes.reshape(-1), np.asarray([shared], dtype=np.int32),
        ])  # fmt: skip
        if len(writes):
            self.operations.scatter(self.table.storage, sent[6].view(-1, 2), sent[3])
        num_tokens = int(rows.query_start[-1])
        query_start, slots, sample_slots = sent[:3]
        tensors = self.step_tensors(query_start, slots, sample_slots, num_tokens)
        sample_slots, lengths, logit_tokens = (
            tensors.sample_slots,
            tensors.lengths,
            tensors.last_tokens,
        )
        if not np.array_equal(logits.tokens, rows.query_start[1:] - 1):
            logit_tokens = sent[5].long()
            sample_slots = sample_slots.index_select(0, sent[4])
            lengths = tensors.positions.index_select(0, logit_tokens) + 1
        seq_lens = rows.seq_lens - self.table.num_dropped[rows.slots]
        return StepInputs(
            input_ids=tensors.input_ids,
            positions=tensors.positions,
            slots=slots,
            layouts=self.layouts(
                tensors,
                query_start,
                rows.query_start,
                seq_lens,
                slots=slots,
                block_size=self.block_size,
                shared_prefix=sent[7] if shared else None,
            ),
            source=self.source_layout(
                slots, query_start, np.repeat(self.table.num_source[rows.slots], rows.query_lens)
            ),
            logit_tokens=logit_tokens,
            sample_slots=sample_slots,
            sample_lengths=lengths,
            logit_rows=logits.rows.tolist(),
        )

    def step_tensors(
        self,
        query_start: torch.Tensor,
        slots: torch.Tensor,
        sample_slots: torch.Tensor,
        num_tokens: int,
    ) -> StepTensors:
        """Expand rows on the device, and advance the slots. All int32: query_start [R + 1], slots
        and sample_slots [R].
        """
        table = self.table
        tensors = self.operations.step_inputs(
            query_start, slots, sample_slots, num_tokens, table.lengths,
            table.token_history, table.block_table, self.block_size, **table.compression,
        )  # fmt: skip
        self.operations.advance(table.lengths, slots, query_start)
        return tensors

    def layouts(
        self,
        inputs: DecodeTensors | StepTensors,
        query_start: torch.Tensor,
        query_start_cpu: np.ndarray,
        seq_lens_cpu: np.ndarray,
        **bounds: Any,
    ) -> tuple[BatchLayout, ...]:
        """Return each group's layout from device tensors. `bounds`: see `BatchLayout.of`."""
        count, columns = self.num_groups, self.table.columns
        bounds["bounded"] = self.num_drafts > 0
        bounds |= self.compression(inputs.positions)
        places = [inputs.slot_mapping]
        if count > 1:
            places += self.operations.slot_mappings(
                inputs.block_table, columns, query_start,
                self._cache_places(inputs, query_start), self.block_size,
            )  # fmt: skip
        return tuple(
            BatchLayout.of(
                query_start=query_start,
                seq_lens=inputs.seq_lens,
                block_table=inputs.block_table[:, number * columns : (number + 1) * columns],
                slot_mapping=slot_mapping,
                query_start_cpu=query_start_cpu,
                seq_lens_cpu=seq_lens_cpu,
                group=number,
                **bounds,
            )
            for number, slot_mapping in enumerate(places)
        )

    def compression(self, positions: torch.Tensor) -> dict[str, Any]:
        """Return what `BatchLayout.of` needs where caches lose tokens. positions: [T]"""
        more: dict[str, Any] = {}
        if self.table.dropped is not None:
            more["positions"] = positions
        if self._levels is not None:
            more["levels"] = self._levels
        return more

    def cache_places(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the places of these slots' positions in their caches: less what was dropped."""
        dropped = self.table.dropped
        return positions if dropped is None else positions - dropped[slots]

    def _cache_places(
        self, inputs: DecodeTensors | StepTensors, query_start: torch.Tensor
    ) -> torch.Tensor:
        """Return each token's place in its cache, [T] int64: its position, less dropped tokens."""
        positions = inputs.positions
        if self.table.dropped is None:
            return positions
        if len(inputs.seq_lens) == len(positions) and isinstance(inputs, DecodeTensors):
            # One token a row, the last of its cache: one launch.
            return torch.sub(inputs.seq_lens, 1, out=torch.empty_like(positions))
        dropped = inputs.lengths - inputs.seq_lens
        tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        rows = torch.searchsorted(query_start[1:].contiguous(), tokens, right=True)
        return positions - dropped[rows.clamp_(max=len(dropped) - 1)]

    def source_layout(
        self, slots: torch.Tensor, query_start: torch.Tensor, bounds: np.ndarray
    ) -> BatchLayout | None:
        """Return the layout of attention to sources, or None.

        Each of T tokens is a row whose sequence is its slot's source. slots: [R] int; query_start:
        [R + 1] int32; bounds: [T] upper bounds of source lengths.
        """
        table = self.table
        if table.source_lengths is None:
            return None
        num_tokens, first = len(bounds), self.num_groups * table.columns
        starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=self.device)
        if len(slots) != num_tokens:
            rows = torch.searchsorted(query_start[1:].contiguous(), starts[:-1], right=True)
            slots = slots[rows.clamp_(max=len(slots) - 1)]
        sources = table.block_table[:, first : first + table.columns]
        return BatchLayout.of(
            query_start=starts,
            # Padding has no source: it reads one place of the null block.
            seq_lens=table.source_lengths.index_select(0, slots).clamp_(min=1),
            block_table=sources.index_select(0, slots),
            # Nothing is written where it reads.
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=self.device),
            query_start_cpu=np.arange(num_tokens + 1, dtype=np.int32),
            seq_lens_cpu=np.maximum(bounds, 1),
            slots=slots,
        )

    def source_bounds(self, num_tokens: int) -> np.ndarray:
        """Return default bounds for `source_layout`: [num_tokens]"""
        return np.full(num_tokens, self.max_source_tokens, dtype=np.int32)

    # ------------------------------------------------------------ to the device

    def upload(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy int32 parts to the device in one copy; return views."""
        sizes = [len(part) for part in parts]
        total = sum(sizes)
        if self.device.type == "cpu":
            packed = torch.from_numpy(np.concatenate(parts))
        else:
            staging = self.staging(total)
            np.concatenate(parts, out=staging.numpy()[:total])
            packed = staging[:total].to(self.device, non_blocking=True)
        return list(torch.split(packed, sizes))

    def copy_into(self, target: torch.Tensor, numbers: np.ndarray) -> None:
        """Copy int32 numbers to the front of a device array."""
        size = len(numbers)
        if self.device.type == "cpu":
            target[:size].copy_(torch.from_numpy(numbers))
            return
        staging = self.staging(size)
        staging.numpy()[:size] = numbers
        target[:size].copy_(staging[:size], non_blocking=True)

    def staging(self, size: int) -> torch.Tensor:
        """Return the ring's next pinned buffer, of at least `size` int32 numbers."""
        if not self._staging:
            self._staging = [
                torch.empty(0, dtype=torch.int32, pin_memory=True) for _ in range(self.num_staging)
            ]
        self._next_buffer = (self._next_buffer + 1) % self.num_staging
        if self._staging[self._next_buffer].numel() < size:
            self._staging[self._next_buffer] = torch.empty(
                max(size, 16384) * 2, dtype=torch.int32, pin_memory=True
            )
        return self._staging[self._next_buffer]
