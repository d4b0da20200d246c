"""A speculator at work: what it learns of requests, its model's passes, and what it proposes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ...parts.speculation import DraftStart
from ...protocols.speculators import (
    PROMPT_END,
    Drafts,
    KnownTokens,
    RequestText,
    Speculator,
)
from ...step import SlotStart, StepPlan
from ..graphs.pass_graphs import PassGraphs, RowDrafts
from ..graphs.recorder import Recorder
from ..packing import PackedUpload
from ..slot_table import SlotTable
from .draft_passes import DraftPasses, PassRows

logger = logging.getLogger("jackfield.worker")


class Drafter:
    """Calls the speculator, if there is one here that has not failed. Launch thread only."""

    def __init__(
        self,
        speculator: Speculator | None,
        who: str,
        table: SlotTable,
        num_drafts: int,
        passes: DraftPasses | None,
        *,
        alone: bool,
    ) -> None:
        """who: for messages; num_drafts: most per row; passes: of a speculator that needs more than
        tokens; alone: no other rank drafts."""
        self._speculator = speculator
        self._who, self._table, self._num_drafts = who, table, num_drafts
        self.passes, self._alone = passes, alone
        self._started: set[int] = set()
        """Slots whose end the speculator wants to know."""
        self.graphs: PassGraphs | None = None
        """Recorded passes, once there are any."""

    @property
    def works(self) -> bool:
        return self._speculator is not None

    # ------------------------------------------------------------ requests

    def start(self, start: SlotStart, part: DraftStart) -> None:
        if self._speculator is None:
            return
        end = start.num_prompt_tokens
        text = RequestText(
            slot=start.slot,
            num_tokens=len(start.token_ids),
            num_prompt_tokens=end,
            sharing=part.sharing,
            prompt_end=start.token_ids[max(0, end - PROMPT_END) : end],
            prediction=part.prediction,
        )
        with self._guarded():
            self._speculator.start(text)
            if type(self._speculator).release is not Speculator.release:
                self._started.add(start.slot)

    def release(self, slot: int) -> None:
        if slot not in self._started:
            return
        self._started.discard(slot)
        if self._speculator is not None:
            with self._guarded():
                bound = int(self._table.length_bounds[slot]) + 1
                self._speculator.release(self._known_tokens([slot]), slot, bound)

    # ------------------------------------------------------------ proposals

    def next_drafts(self, plan: StepPlan, which: Sequence[int], *, rests: bool) -> RowDrafts | None:
        """Let the speculator read what the step has computed, and propose. which: rows that get
        drafts; None: there are none. rests: nothing is proposed for now."""
        if self._speculator is None or not plan.slots:
            return None
        slots = [plan.slots[row] for row in which]
        if self.passes is None:
            return self._proposed(self._known_tokens(slots)) if slots else None
        graphs, observed = self.graphs, None
        if graphs is not None and rests and graphs.launch_alone(plan):
            return None
        if graphs is not None and (drafts := graphs.launch(plan, which)) is not None:
            return drafts
        if self._observes:
            with self._guarded():
                observed = self.observe(self.passes.rows(plan))
        if not slots or self._speculator is None:
            return None
        if graphs is not None:
            drafts = graphs.launch_proposal(plan, which, observed)
            if drafts is not None:
                return drafts
        return self._proposed(self.passes.known(self.passes.proposal_rows(plan, which), observed))

    def scratch_drafts(self) -> RowDrafts | None:
        """Propose for the scratch slot, whose blocks are the null block, compiling kernels."""
        if self._speculator is None:
            return None
        scratch = self._table.scratch_slot
        if self.passes is None:
            return self._proposed(self._known_tokens([scratch]))
        slots = torch.full((1,), scratch, dtype=torch.int32, device=self._table.storage.device)
        observed = self.observe(self.passes.alike(slots, 1)) if self._observes else None
        return self._proposed(self.passes.recorded(slots, torch.zeros_like(slots), observed))

    def _proposed(self, tokens: KnownTokens) -> RowDrafts | None:
        with self._guarded():
            return RowDrafts(tokens.slots, self.propose(tokens))
        return None

    def propose(self, tokens: KnownTokens) -> Drafts:
        """Return the speculator's drafts; recordable, if it has passes."""
        assert self._speculator is not None, "asked of a speculator that has failed"
        drafts = self._speculator.propose(tokens)
        shapes = tuple(drafts.token_ids.shape), tuple(drafts.counts.shape)
        num_rows = len(tokens.slots)
        if shapes != ((num_rows, self._num_drafts), (num_rows,)):
            raise ValueError(
                f"propose gave token_ids and counts of {shapes[0]} and {shapes[1]}, for "
                f"{num_rows} rows of {self._num_drafts} drafts"
            )
        return drafts if self.passes is None else self.passes.within(drafts, tokens.lengths)

    @property
    def _observes(self) -> bool:
        speculator = self._speculator
        return speculator is not None and type(speculator).observe is not Speculator.observe

    def observe(self, rows: PassRows) -> torch.Tensor | None:
        """Return the speculator's states of a step's tokens; recordable."""
        assert self.passes is not None and self._speculator is not None, "it has passes"
        states = self._speculator.observe(self.passes.whole(rows))
        if states is not None and (states.dim() != 2 or len(states) != len(rows.row_of)):
            raise ValueError(
                f"observe gave states of {tuple(states.shape)} for {len(rows.row_of)} tokens"
            )
        return states

    # ------------------------------------------------------------ recorded passes

    def pass_graphs(self, record: Recorder, widths: Sequence[int]) -> PassGraphs | None:
        """Return graphs of the speculator's passes; None: they cannot be recorded. Nothing is
        recorded yet. widths: numbers of drafts that all rows of a step may have."""
        passes, speculator = self.passes, self._speculator
        if passes is None or speculator is None or not speculator.recordable or not passes.widest:
            return None

        def observe(slots: torch.Tensor, width: int) -> torch.Tensor | None:
            return self.observe(passes.alike(slots, width))

        return PassGraphs(
            observe=observe if self._observes else None,
            known=passes.recorded,
            propose=self.propose,
            batch=passes.batch,
            record=record,
            widths=[1 + number for number in (0, *widths) if 1 + number <= passes.widest],
            num_drafts=self._num_drafts,
        )

    def launch_passes(self, error: Exception) -> None:
        """Go on with launched passes: they cannot be recorded."""
        if self.graphs is not None:
            self.graphs.stop()
        logger.warning(
            "the passes of %s are launched kernel by kernel, as they cannot be recorded: %s",
            self._who, error,
        )  # fmt: skip

    # ------------------------------------------------------------ helpers

    def _known_tokens(self, slots: Sequence[int]) -> KnownTokens:
        device_slots = sent(slots, self._table.storage.device)
        # The newest token is behind the computed ones.
        lengths = self._table.lengths[device_slots].long() + 1
        return KnownTokens(self._table.token_history, device_slots, lengths)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Go on without drafts if the speculator raises."""
        try:
            yield
        except Exception:
            if self.passes is not None and not self._alone:
                raise  # Other ranks may wait for this one.
            logger.exception("%s failed: the engine goes on without drafts", self._who)
            self._speculator = None


def sent(slots: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return slots on the device, int64."""
    upload = PackedUpload(device)
    upload.add(np.asarray(slots, dtype=np.int64))
    return upload.send()[0]
