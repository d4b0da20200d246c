"""Verifies the drafts of a step's rows, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...nn.operations import Operations
from ...nn.step_operations.drafts import DraftTables
from ...parts.speculation import NAME
from ...step import StepPlan
from ..batch import LogitRows, StepRows
from ..launched_step import DraftCounts
from ..packing import PackedUpload
from ..sampling.rejection import DraftDistributions, DrawnDrafts
from ..sampling.rounds import DraftPlaces
from ..sampling.sampling_state import SamplingState
from ..slot_table import SlotTable


@dataclass(frozen=True)
class DraftedRows:
    """Positions at which a step with drafts samples. L = positions, S = sampling rows."""

    host: DraftCounts
    slots_host: Sequence[int]
    """[num_rows] Slots of the plan."""
    logit_rows: list[int]
    """[L] Rows of the plan."""
    logit_tokens: torch.Tensor
    """[L] int64: index into the step's tokens."""
    slots: torch.Tensor
    """[L] int64"""
    lengths: torch.Tensor
    """[L] int64: tokens before the one that is sampled."""
    drafts: torch.Tensor
    """[L] int32: draft at the sampled token's place; undefined at a row's last position."""
    starts: torch.Tensor
    """[S + 1] int32: each row's first position, and the total."""
    row_slots: torch.Tensor
    """[S] int64"""
    drawn: DrawnDrafts | None
    """The same drafts, if they are accepted by what they were drawn from."""


class DraftVerifier:
    """Keeps a row's tokens up to the first that differs from its draft."""

    def __init__(
        self,
        table: SlotTable,
        tables: DraftTables,
        sampling: SamplingState,
        operations: Operations,
        num_drafts: int,
        distributions: DraftDistributions | None,
    ) -> None:
        """num_drafts: most per row; distributions: what drafts were drawn from, if that decides."""
        self._table, self._tables = table, tables
        self._sampling, self._operations = sampling, operations
        self._num_drafts, self._distributions = num_drafts, distributions
        self._device = table.storage.device

    def rows(self, plan: StepPlan, rows: StepRows) -> DraftedRows:
        """Return where a step samples; call between the forward pass and sampling, which overwrites
        the drafts.
        """
        num_drafts = plan.parts[NAME].num_drafts
        logits = LogitRows.verifying(rows, plan.samples, num_drafts)
        sampling, firsts = np.unique(logits.rows, return_index=True)
        counts = np.asarray(num_drafts, dtype=np.int32)[sampling]
        back = firsts.repeat(counts + 1) + counts.repeat(counts + 1) - np.arange(len(logits.rows))
        starts = np.append(firsts, len(logits.rows)).astype(np.int32)
        upload = PackedUpload(self._device)
        for array in (
            logits.tokens.astype(np.int64), rows.slots[logits.rows].astype(np.int64), back,
            starts, rows.slots[sampling].astype(np.int64), self._places(back, counts),
        ):  # fmt: skip
            upload.add(array)
        tokens, slots, from_end, device_starts, row_slots, places = upload.send()
        lengths = self._table.lengths[slots] - from_end
        drafts = self._table.token_history[slots, lengths]
        return DraftedRows(
            host=DraftCounts(sampling.tolist(), counts.tolist()),
            slots_host=plan.slots,
            logit_rows=logits.rows.tolist(),
            logit_tokens=tokens,
            slots=slots,
            lengths=lengths,
            drafts=drafts,
            starts=device_starts,
            row_slots=row_slots,
            drawn=self.drawn(drafts, slots, places) if self.rejects else None,
        )

    def _places(self, back: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return each position's place among its row's drafts, the most of a row at its last.

        back: [L] drafts after each position; counts: [S] → [L] int64
        """
        order = counts.repeat(counts + 1) - back
        return np.where(back > 0, order, self._num_drafts).astype(np.int64)

    @property
    def rejects(self) -> bool:
        """Whether drafts are accepted by what they were drawn from, not while they are sampled."""
        return self._distributions is not None

    def drawn(self, drafts: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> DrawnDrafts:
        """Return the drafts of L positions if `rejects`; recordable. places: as
        `DraftDistributions.of`."""
        assert self._distributions is not None, "it rejects"
        return self._distributions.of(drafts, slots, places)

    def limit(self, drafted: DraftedRows, limits: torch.Tensor) -> None:
        """Let so many drafts of each row be accepted at most. limits: [S] int32"""
        proposed, slots = self._tables.num_proposed, drafted.row_slots
        proposed[slots] = torch.minimum(proposed[slots], limits)

    def places(self, drafted: DraftedRows) -> DraftPlaces | None:
        """Return what sampling in rounds needs; None: no row's tokens depend on its output."""
        slots = [drafted.slots_host[row] for row in drafted.host.rows]
        in_turn = [self._sampling.depends_on_output(slot) for slot in slots]
        if not any(in_turn):
            return None
        proposed = self._tables.num_proposed[drafted.row_slots]
        return DraftPlaces(drafted.host.counts, drafted.drafts, proposed, in_turn, drafted.drawn)

    def verify(self, drafted: DraftedRows, chosen: torch.Tensor) -> torch.Tensor:
        """Accept sampled drafts, and take the others out of lengths.

        chosen: [L] int32 → [S, 2] int32: accepted and proposed drafts
        """
        return self.verified(chosen, drafted.drafts, drafted.starts, drafted.row_slots)

    def verified(
        self,
        chosen: torch.Tensor,
        drafts: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """As `verify`, from parts of `DraftedRows`; recordable."""
        return self._operations.verify_drafts(
            chosen, drafts, starts, slots, self._tables, self._num_drafts
        )
