"""Passes of a speculator's own model: over a step's tokens, then one token per row at a time.

The first pass computes the same tokens as the target's step, so each block has the model's keys and
values, too, whatever becomes of the drafts. Tokens after that are drafts of drafts: their keys and
values go to blocks that belong to the slot and to no request ("own blocks"), which begin with a
copy of the slot's last, partly filled block. So drafting takes no blocks from the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...nn.context import BatchLayout, ForwardContext, MixedRows, Taps
from ...nn.step_operations.sampling import SlotTables
from ...protocols.attention import PagedBackend
from ...protocols.models import HiddenStates
from ...protocols.speculators import ComputedTokens, Drafts, KnownTokens, SpeculatorNeeds
from ...step import StepPlan
from ..batch import PersistentBatch, StepInputs, StepRows
from ..packing import PackedUpload
from ..sampling.gumbel import TokenNoise
from ..sampling.rejection import DraftDistributions
from ..sampling.sampler import sample_outputs
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
    """R rows of a step whose tokens are chosen, T tokens."""

    slots: torch.Tensor
    """[R] int32"""
    query_start: torch.Tensor
    """[R + 1] int32"""
    row_of: torch.Tensor
    """[T] int64: each token's row"""
    sizes: Mapping[str, Any]
    """What the host knows of the rows: arguments of `BatchLayout.of`."""


@dataclass(frozen=True)
class ProposalRows:
    """R rows of a step that get drafts."""

    slots: torch.Tensor
    """[R] int64"""
    starts: torch.Tensor
    """[R] int64: each row's first token in the step."""
    bounds: np.ndarray
    """[R] Upper bounds of cached tokens, without the newest one."""


class DraftPasses:
    """Contexts of a speculator's passes, and its choice of tokens. Launch thread only."""

    def __init__(
        self,
        batch: PersistentBatch,
        sampling: SamplingState,
        model: nn.Module | None,
        layers: Sequence[CacheLayer],
        backend: PagedBackend | None,
        states: TokenStates,
        num_drafts: int,
        longest: int,
        *,
        samples: bool = True,
        rejects: torch.dtype | None = None,
    ) -> None:
        """layers: of the model, those that cache; longest: tokens of a sequence that it reads;
        samples: drafts are drawn by their requests' temperatures, else the most probable ones;
        rejects: drafts are accepted by what they were drawn from, which is kept in this type."""
        self._model, self._num_drafts = model, num_drafts
        self.batch, self._sampling, self._layers = batch, sampling, tuple(layers)
        self._backend, self.states = backend, states
        self._longest = longest
        self._noise = TokenNoise(sampling.vocab_size, batch.device)
        self._samples = samples
        self._outputs = sample_outputs(batch.num_slots, batch.device)
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

    # ------------------------------------------------------------ the step's tokens

    def rows(self, plan: StepPlan) -> PassRows:
        """Return the plan's rows after its step."""
        batch = self.batch
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        slots = np.asarray(plan.slots, dtype=np.int32)
        rows = StepRows.of(slots, batch.table.length_bounds[slots] - counts, counts, slots)
        query_start, device_slots = batch.upload([rows.query_start, rows.slots])
        order = torch.arange(len(slots), device=batch.device)
        lens = query_start.diff().long()
        row_of = torch.repeat_interleave(order, lens, output_size=int(rows.query_start[-1]))
        sizes = {
            "query_start_cpu": rows.query_start,
            "seq_lens_cpu": rows.seq_lens - batch.table.num_dropped[slots],
            "block_size": batch.block_size,
        }  # fmt: skip
        return PassRows(device_slots, query_start, row_of, sizes)

    def alike(self, slots: torch.Tensor, width: int) -> PassRows:
        """Return rows of as many tokens each, of which the host knows no more; recordable.

        slots: [R] int32, the scratch slot any number of times
        """
        num_rows = len(slots)
        order = torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device)
        row_of = torch.arange(num_rows * width, device=slots.device) // width
        sizes: dict[str, Any] = {
            "query_start_cpu": np.arange(num_rows + 1, dtype=np.int32),
            "seq_lens_cpu": np.full(num_rows, self.batch.max_model_len, dtype=np.int32),
        }
        if width > 1:
            bounds = num_rows * torch.arange(2, dtype=torch.int32, device=slots.device)
            sizes |= {
                "query_start_cpu": np.zeros(num_rows + 1, dtype=np.int32), "max_query_len": width,
                "mixed": MixedRows(bounds, 0, num_rows, width),
            }  # fmt: skip
        return PassRows(slots, width * order, row_of, sizes)

    def whole(self, step: PassRows) -> ComputedTokens:
        """Return the tokens of a step; recordable."""
        batch, table, states = self.batch, self.batch.table, self.states
        slots = step.slots.long()
        first = states.positions[step.query_start[:-1].long()].int()
        # Of padding, positions are those of any step before.
        first = first.masked_fill(slots == batch.scratch_slot, 0)
        self._lengths.index_copy_(0, slots, first)
        num_tokens = len(step.row_of)
        tensors = batch.operations.step_inputs(
            step.query_start, step.slots, step.slots, num_tokens, self._lengths,
            table.token_history, table.block_table, batch.block_size, **table.compression,
        )  # fmt: skip
        layouts = batch.layouts(tensors, step.query_start, slots=step.slots, **step.sizes)
        positions = tensors.positions
        return ComputedTokens(
            token_ids=tensors.input_ids,
            next_ids=table.token_history[slots[step.row_of], positions + 1].long(),
            positions=positions,
            hidden=None if states.hidden is None else states.hidden[:num_tokens],
            taps=None if states.taps is None else states.taps[:num_tokens],
            context=self._context(layouts, positions),
        )

    def _context(self, layouts: Sequence[BatchLayout], positions: torch.Tensor) -> ForwardContext:
        within = positions.clamp(max=self._longest - 1)
        return ForwardContext.of(self._backend, layouts, within)

    # ------------------------------------------------------------ one token per row

    def proposal_rows(self, plan: StepPlan, which: Sequence[int]) -> ProposalRows:
        """Return these rows of a plan after its step."""
        counts = np.asarray(plan.num_tokens, dtype=np.int64)
        starts = (np.cumsum(counts) - counts)[list(which)]
        slots = np.asarray(plan.slots, dtype=np.int64)[list(which)]
        upload = PackedUpload(self.batch.device)
        upload.add(slots)
        upload.add(starts)
        device_slots, device_starts = upload.send()
        table = self.batch.table
        bounds = table.length_bounds[slots] - table.num_dropped[slots]
        return ProposalRows(device_slots, device_starts, bounds)

    def recorded(
        self, slots: torch.Tensor, starts: torch.Tensor, observed: torch.Tensor | None
    ) -> KnownTokens:
        """As `known`, of rows of which the host knows no more; recordable. slots, starts: [R]
        int32"""
        bounds = np.full(len(slots), self.batch.max_model_len, dtype=np.int32)
        return self.known(ProposalRows(slots.long(), starts.long(), bounds), observed)

    def known(self, rows: ProposalRows, observed: torch.Tensor | None) -> KnownTokens:
        """Return the tokens of rows; recordable. observed: of all tokens of the step."""
        table, states = self.batch.table, self.states
        lengths = table.lengths[rows.slots].long() + 1
        first = states.positions[rows.starts]
        # Of padding, positions are those of any step before.
        last = (rows.starts + (lengths - 2 - first)).clamp(min=0)
        return KnownTokens(
            table.token_history, rows.slots, lengths,
            hidden=None if states.hidden is None else states.hidden[last],
            rows=RowsAhead(self, rows.slots, lengths, rows.bounds),
            states=None if observed is None else observed[last],
        )  # fmt: skip

    def within(self, drafts: Drafts, lengths: torch.Tensor) -> Drafts:
        """Return drafts without those of sequences that the model does not read."""
        reads = lengths + drafts.token_ids.shape[1] <= self._longest
        return drafts._replace(counts=drafts.counts * reads)

    def own_table(self, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return tables that go on in own blocks where the newest token is, and copy what is before
        it in its block → [R, groups, columns] int32."""
        batch, number = self.batch, self._num_own
        columns = batch.table.columns
        first = self.batch.cache_places(lengths - 1, slots).div(
            batch.block_size, rounding_mode="floor"
        )
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
        bounds: [R] of cached tokens with it."""
        size, num_rows = self.batch.block_size, len(slots)
        places = self.batch.cache_places(positions, slots)
        columns = places.div(size, rounding_mode="floor")
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device)
        starts_cpu = np.arange(num_rows + 1, dtype=np.int32)
        layouts = []
        for group in range(self.batch.num_groups):
            blocks = table[:, group].gather(1, columns[:, None])[:, 0].long()
            layouts.append(
                BatchLayout.of(
                    query_start=starts,
                    seq_lens=(places + 1).int(),
                    block_table=table[:, group],
                    slot_mapping=blocks * size + places % size,
                    query_start_cpu=starts_cpu,
                    seq_lens_cpu=bounds,
                    block_size=size,
                    group=group,
                    slots=slots,
                    **self.batch.compression(positions),
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
        if self.batch.operations.samples and self.distributions is None:
            # Its token goes to the history, too, where `keep_drafts` puts the draft.
            state, out = self._sampling, self._outputs.first(len(slots))
            tables = SlotTables(state.packed, state.counts, state.allowed, state.token_history)
            self.batch.operations.sample(logits, slots, lengths, tables, out, plain=True)
            return out.chosen.long().clamp_(min=0)
        packed = self._sampling.packed.index_select(0, slots)
        if self.distributions is not None:
            return self.distributions.draw(logits, number, slots, packed, lengths)
        settings = packed.view(torch.float32)
        keys = self._noise.row_keys(packed[:, Column.LANES :], lengths)
        own = slice(0, logits.shape[1])
        scores = logits.float() * settings[:, Column.INVERSE_TEMPERATURE, None]
        drawn = self._noise.exponential(keys, own=own).log_()
        return (scores - drawn * settings[:, Column.NOISE, None]).argmax(dim=-1)

    @property
    def widest(self) -> int:
        """Tokens of a row in the widest step that may be recorded; 0: none may be."""
        model = self._model
        if not getattr(model, "graph_safe", True):
            return 0
        backend = self._backend
        if backend is None or backend.mixed_graph_safe:
            return 1 + self._num_drafts
        return int(backend.graph_safe)

    def bind(self) -> None:
        """Find the own blocks in the memory that the layers were given."""
        if self._layers:
            batch = self.batch
            blocks = next(iter(self._layers[0].cache.values())).shape[1]
            self._first_own = blocks - batch.num_groups * (batch.num_slots + 1) * self._num_own


@dataclass
class RowsAhead:
    """`DraftRows` of one proposal."""

    passes: DraftPasses
    slots: torch.Tensor
    lengths: torch.Tensor
    bounds: np.ndarray
    """[R] of cached tokens, without the newest one."""
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
