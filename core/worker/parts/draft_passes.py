"""Passes of a speculator's own model: over a step's tokens, then one token per row at a time.

The first pass computes the same tokens as the target's step, so each block has the model's keys and
values, too, whatever becomes of the drafts. Tokens after that are drafts of drafts: their keys and
values go to blocks that belong to the slot and to no request ("own blocks"), which begin with a
copy of the slot's last, partly filled block. So drafting takes no blocks from the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...nn.context import BatchLayout, ForwardContext, Taps
from ...protocols.attention import PagedBackend
from ...protocols.models import HiddenStates
from ...protocols.speculators import ComputedTokens, Drafts, KnownTokens, SpeculatorNeeds
from ...step import StepPlan
from ..batch import PersistentBatch, StepInputs, StepRows
from ..sampling.gumbel import TokenNoise
from ..sampling.rejection import DraftDistributions
from ..sampling.sampling_columns import Column
from ..sampling.sampling_state import SamplingState
from ..selection import CacheLayer


def own_blocks(num_drafts: int, block_size: int) -> int:
    """Return the blocks that the drafts of a slot may touch, from the one with the newest token."""
    return (block_size - 1 + num_drafts - 1) // block_size + 1


class TokenStates:
    """The target's states of a step's tokens, kept until its tokens are chosen. Recorded steps
    write here, too."""

    def __init__(
        self, target: nn.Module, num_tokens: int, size: int, needs: SpeculatorNeeds, **kind: Any
    ) -> None:
        """num_tokens: of a step at most; size: of a hidden state; kind: dtype and device."""
        self._last_states: Any = getattr(target, "last_states", None)
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=kind["device"])
        self.hidden = torch.zeros(num_tokens, size, **kind) if needs.hidden else None
        self.taps: torch.Tensor | None = None
        self.layers: Taps | None = None
        """Where the target's layers keep their inputs."""
        if needs.taps:
            self.taps = torch.zeros(num_tokens, len(needs.taps) * size, **kind)
            columns = {tap: slice(n * size, (n + 1) * size) for n, tap in enumerate(needs.taps)}
            self.layers = Taps(columns, self.taps)

    def keep(self, inputs: StepInputs, hidden: HiddenStates) -> None:
        """hidden: what the target's `forward` returned, of the step's tokens and padding."""
        count = min(len(inputs.positions), len(self.positions))
        self.positions[:count].copy_(inputs.positions[:count])
        if self.hidden is not None:
            self.hidden[:count].copy_(self._last_states(hidden)[:count])


@dataclass(frozen=True)
class PassRows:
    """R rows of a plan after its step."""

    rows: StepRows
    query_start: torch.Tensor
    """[R + 1] int32"""
    slots: torch.Tensor
    """[R] int32"""
    first_positions: torch.Tensor
    """[R] int32"""


class DraftPasses:
    """Contexts of a speculator's passes, and its choice of tokens. Launch thread only."""

    def __init__(
        self,
        batch: PersistentBatch,
        sampling: SamplingState,
        layers: Sequence[CacheLayer],
        backend: PagedBackend | None,
        states: TokenStates,
        num_drafts: int,
        longest: int,
        *,
        samples: bool = True,
        rejects: torch.dtype | None = None,
    ) -> None:
        """layers: of the model; longest: tokens of a sequence that it reads; samples: drafts are
        drawn by their requests' temperatures, else the most probable ones; rejects: drafts are
        accepted by what they were drawn from, which is kept in this type."""
        self._batch, self._sampling, self._layers = batch, sampling, tuple(layers)
        self._backend, self.states = backend, states
        assert batch.table.dropped is None, "caches of draft models are not compacted"
        self._longest = longest
        self._noise = TokenNoise(sampling.vocab_size, batch.device)
        self._samples = samples
        self.distributions: DraftDistributions | None = None
        """What drafts were drawn from, if that decides about them."""
        if rejects is not None and samples:
            self.distributions = DraftDistributions(
                batch.num_slots + 1, num_drafts, self._noise, sampling.vocab_size, rejects,
                batch.device,
            )  # fmt: skip
        self._num_own = own_blocks(num_drafts, batch.block_size)
        self._lengths = torch.zeros_like(batch.table.lengths)
        self._first_own = 0
        self.rows: PassRows | None = None
        """Of the last step."""

    # ------------------------------------------------------------ the step's tokens

    def whole(self, plan: StepPlan, bounds: np.ndarray) -> ComputedTokens:
        """Return the plan's tokens after its step. bounds: [R] upper bounds of lengths with
        them."""
        batch, table = self._batch, self._batch.table
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        slots = np.asarray(plan.slots, dtype=np.int32)
        rows = StepRows.of(slots, bounds - counts, counts, slots)
        query_start, device_slots = batch.upload([rows.query_start, rows.slots])
        num_tokens = int(rows.query_start[-1])
        positions = self.states.positions[:num_tokens]
        first = positions[query_start[:-1].long()].int()
        self.rows = PassRows(rows, query_start, device_slots, first)
        self._lengths.index_copy_(0, device_slots.long(), first)
        tensors = batch.operations.step_inputs(
            query_start, device_slots, device_slots, num_tokens, self._lengths,
            table.token_history, table.block_table, batch.block_size,
        )  # fmt: skip
        layouts = batch.layouts(
            tensors, query_start, rows.query_start, rows.seq_lens, slots=device_slots,
            block_size=batch.block_size,
        )  # fmt: skip
        row_of = torch.repeat_interleave(
            device_slots.long(), query_start.diff().long(), output_size=num_tokens
        )
        states = self.states
        return ComputedTokens(
            token_ids=tensors.input_ids,
            next_ids=table.token_history[row_of, positions + 1].long(),
            positions=positions,
            hidden=None if states.hidden is None else states.hidden[:num_tokens],
            taps=None if states.taps is None else states.taps[:num_tokens],
            context=self._context(layouts, positions),
        )

    def _context(self, layouts: Sequence[BatchLayout], positions: torch.Tensor) -> ForwardContext:
        within = positions.clamp(max=self._longest - 1)
        return ForwardContext.of(self._backend, layouts, within)

    # ------------------------------------------------------------ one token per row

    def known(self, tokens: KnownTokens, rows: Sequence[int]) -> KnownTokens:
        """Return tokens with what a speculator needs besides. rows: theirs in the last step."""
        slots, lengths, step = tokens.slots, tokens.lengths, self.rows
        assert step is not None, "the step's tokens come first"
        places = self._batch.upload([np.asarray(rows, dtype=np.int32)])[0].long()
        starts = step.query_start[:-1][places].long()
        last = starts + (lengths - 2 - step.first_positions[places].long())
        bounds = step.rows.seq_lens[np.asarray(rows, dtype=np.intp)]
        hidden = None if self.states.hidden is None else self.states.hidden[last]
        ahead = RowsAhead(self, slots, lengths, last, bounds)
        return tokens._replace(hidden=hidden, rows=ahead)

    def within(self, drafts: Drafts, lengths: torch.Tensor) -> Drafts:
        """Return drafts without those of sequences that the model does not read."""
        reads = lengths + drafts.token_ids.shape[1] <= self._longest
        return drafts._replace(counts=drafts.counts * reads)

    def own_table(self, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return tables that go on in own blocks where the newest token is, and copy what is before
        it in its block → [R, groups, columns] int32."""
        batch, number = self._batch, self._num_own
        columns = batch.table.columns
        first = (lengths - 1).div(batch.block_size, rounding_mode="floor")
        whole = batch.table.block_table[slots].view(len(slots), -1, columns)
        whole = torch.nn.functional.pad(whole[:, : batch.num_groups], (0, number))
        order = torch.arange(columns + number, device=slots.device)
        back = (order - first[:, None]).clamp(max=number - 1)
        table = whole.clone()
        for group in {layer.group for layer in self._layers}:
            place = group * (batch.num_slots + 1) + slots[:, None]
            own = self._first_own + place * number + back
            table[:, group] = torch.where(back < 0, whole[:, group], own.int())
            from_, to = (t[:, group].gather(1, first[:, None])[:, 0].long() for t in (whole, table))
            for layer in self._layers:
                for part in layer.cache.values() if layer.group == group else ():
                    part[:, to] = part[:, from_]
        return table

    def row_context(
        self, table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, bounds: np.ndarray
    ) -> ForwardContext:
        """Return the context of one token per row. table: [R, groups, columns]; positions: [R];
        bounds: [R] of lengths with it."""
        size, num_rows = self._batch.block_size, len(slots)
        columns = positions.div(size, rounding_mode="floor")
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device)
        starts_cpu = np.arange(num_rows + 1, dtype=np.int32)
        layouts = []
        for group in range(self._batch.num_groups):
            blocks = table[:, group].gather(1, columns[:, None])[:, 0].long()
            layouts.append(
                BatchLayout.of(
                    query_start=starts,
                    seq_lens=(positions + 1).int(),
                    block_table=table[:, group],
                    slot_mapping=blocks * size + positions % size,
                    query_start_cpu=starts_cpu,
                    seq_lens_cpu=bounds,
                    block_size=size,
                    group=group,
                    slots=slots,
                    bounded=True,
                )
            )
        return self._context(layouts, positions)

    # ------------------------------------------------------------ the choice

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, number: int
    ) -> torch.Tensor:
        """Choose each row's draft `number`, for position `lengths`: [R, tokens] → [R] int64. As a
        plain row's token is chosen, unless it is accepted by what it is drawn from."""
        if not self._samples:
            return logits.argmax(dim=-1)
        packed = self._sampling.packed.index_select(0, slots)
        if self.distributions is not None:
            return self.distributions.draw(logits, number, slots, packed, lengths)
        settings = packed.view(torch.float32)
        keys = self._noise.row_keys(packed[:, Column.LANES :], lengths)
        own = slice(0, logits.shape[1])
        scores = logits.float() * settings[:, Column.INVERSE_TEMPERATURE, None]
        drawn = self._noise.exponential(keys, own=own).log_()
        return (scores - drawn * settings[:, Column.NOISE, None]).argmax(dim=-1)

    def bind(self) -> None:
        """Find the own blocks in the memory that the layers were given."""
        if self._layers:
            batch = self._batch
            blocks = next(iter(self._layers[0].cache.values())).shape[1]
            self._first_own = blocks - batch.num_groups * (batch.num_slots + 1) * self._num_own


@dataclass
class RowsAhead:
    """`DraftRows` of one proposal."""

    passes: DraftPasses
    slots: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor
    bounds: np.ndarray
    """[R] of lengths with the newest token's predecessor."""
    table: torch.Tensor | None = None

    def positions(self, number: int) -> torch.Tensor:
        return self.lengths - 1 + number

    def context(self, number: int) -> ForwardContext:
        if self.table is None:
            self.table = self.passes.own_table(self.slots, self.lengths)
        bounds = (self.bounds + 1 + number).astype(np.int32)
        return self.passes.row_context(self.table, self.slots, self.positions(number), bounds)

    def choose(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        return self.passes.choose(logits, self.slots, self.lengths + number, number)
