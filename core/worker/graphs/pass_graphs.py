"""What a speculator's model does after a step, as recorded graphs: its pass over the step's tokens,
and the passes that propose drafts, in one graph by rows and tokens of a row.

After a step whose rows compute different numbers of tokens, the first pass is launched, and the
others are one graph by rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...protocols.speculators import Drafts, KnownTokens
from ...step import StepPlan
from ..batch import PersistentBatch
from .draft_graphs import MAX_TOKENS
from .endings import row_counts
from .recorder import Recorder, Replay
from .static_numbers import StaticNumbers

logger = logging.getLogger("jackfield.worker")

ANY = 0
"""In place of a width: the states of the rows' tokens are given."""
ALONE = -1
"""In place of a width: one token of each row is read, and nothing is proposed."""


class RowDrafts(NamedTuple):
    """Proposed drafts of R rows, overwritten by the next run."""

    slots: torch.Tensor
    """[R] int64"""
    drafts: Drafts


class PassGraphs:
    """Records passes by rows and width, and replays them; fewer rows are padded."""

    def __init__(
        self,
        *,
        observe: Callable[[torch.Tensor, int], torch.Tensor | None] | None,
        known: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], KnownTokens],
        propose: Callable[[KnownTokens], Drafts],
        batch: PersistentBatch,
        record: Recorder,
        widths: Sequence[int],
        num_drafts: int,
    ) -> None:
        """`observe`: slots [R] int32 and tokens of each row → states of the step's tokens; None:
        there are none, nor a pass over them; `known`: slots, each row's first token in the step [R]
        int32, and states of the step's tokens → the rows' tokens; `propose`: their drafts;
        `widths`: tokens of each row, where all have as many.
        """
        self._observe, self._known_tokens, self._propose = observe, known, propose
        self._batch, self._record = batch, record
        max_rows = batch.num_slots
        alike = () if observe is None else sorted(set(widths), reverse=True)
        self._kinds = [
            (rows, width)
            for rows in row_counts(max_rows)
            for width in (*alike, ANY, *((ALONE,) if alike else ()))
            if rows * width <= min(batch.max_tokens, MAX_TOKENS)
        ]
        """Smallest first: drafts pay for few rows."""
        self._replays: dict[tuple[int, int], Replay] = {}
        self._numbers = StaticNumbers(batch, 2 * max_rows)
        self._long_slots = torch.zeros(max_rows, dtype=torch.int64, device=batch.device)
        self._states: torch.Tensor | None = None
        """[max_rows, any size] Of the rows, where they are given."""
        self._token_ids = torch.zeros(
            (max_rows, num_drafts), dtype=torch.int64, device=batch.device
        )
        self._counts = torch.zeros(max_rows, dtype=torch.int64, device=batch.device)

    # ------------------------------------------------------------ serving a step

    def launch(self, plan: StepPlan, which: Sequence[int]) -> RowDrafts | None:
        """Replay all passes after a plan's step; None: no graph serves them. which: its rows that
        get drafts."""
        num_rows, width = len(plan.slots), plan.num_tokens[0]
        if len(which) != num_rows or plan.num_tokens.count(width) != num_rows:
            return None
        rows = self._recorded_rows(num_rows, width)
        if rows is None:
            return None
        starts = width * np.arange(num_rows, dtype=np.int32)
        return self._replay(plan.slots, starts, rows, width)

    def launch_alone(self, plan: StepPlan) -> bool:
        """Replay the pass over the plan's tokens, one of each row; False: no graph serves it."""
        num_rows = len(plan.slots)
        rows = self._recorded_rows(num_rows, ALONE)
        if rows is None or len(plan.num_tokens) != sum(plan.num_tokens):
            return False
        self._replay(plan.slots, np.arange(num_rows, dtype=np.int32), rows, ALONE)
        return True

    def launch_proposal(
        self, plan: StepPlan, which: Sequence[int], observed: torch.Tensor | None
    ) -> RowDrafts | None:
        """Replay the passes that propose. observed: states of the plan's tokens"""
        rows = self._recorded_rows(len(which), ANY)
        if rows is None:
            return None
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        places = list(which)
        starts = (np.cumsum(counts, dtype=np.int32) - counts)[places]
        slots = np.asarray(plan.slots, dtype=np.int32)[places]
        return self._replay(slots, starts, rows, ANY, observed)

    def run_scratch(self, rows: int, width: int) -> None:
        """Replay all passes of the scratch slot alone, if they are recorded."""
        if (rows, width) in self._replays:
            self._replay((), np.zeros(0, dtype=np.int32), rows, width)

    def _recorded_rows(self, num_rows: int, width: int) -> int | None:
        able = (n for n, kind in self._replays if kind == width and n >= num_rows)
        return min(able, default=None)

    def _replay(
        self,
        slots: Sequence[int] | np.ndarray,
        starts: np.ndarray,
        rows: int,
        width: int,
        observed: torch.Tensor | None = None,
    ) -> RowDrafts:
        self._send(slots, starts, rows)
        if observed is not None and self._states is not None:
            own = self._known_tokens(*self._rows(rows), observed).states
            assert own is not None, "states of the step's tokens are given"
            self._states[:rows].copy_(own)
        self._replays[rows, width]()
        num_rows = len(slots)
        drafts = Drafts(self._token_ids[:num_rows], self._counts[:num_rows])
        return RowDrafts(self._long_slots[:num_rows], drafts)

    def _send(self, slots: Sequence[int] | np.ndarray, starts: np.ndarray, rows: int) -> None:
        numbers = np.zeros((2, rows), dtype=np.int32)
        numbers[0] = self._batch.scratch_slot
        numbers[0, : len(slots)] = slots
        numbers[1, : len(slots)] = starts
        self._numbers.send(numbers.reshape(-1))

    def _rows(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots and first tokens as they were sent, [rows] int32 each."""
        slots, starts = self._numbers.array[: 2 * rows].view(2, rows)
        return slots, starts

    # ------------------------------------------------------------ recording

    def record_next(self) -> bool:
        """Record one more; return whether more are left."""
        missing = [kind for kind in self._kinds if kind not in self._replays]
        if missing:
            self.record(*missing[0])
        return len(missing) > 1

    def stop(self) -> None:
        """Use none, and record no more."""
        self._kinds, self._replays = [], {}

    def record(self, rows: int, width: int) -> None:
        """Raises RuntimeError, also for errors of the speculator."""
        began = time.monotonic()
        self._send((), np.zeros(0, dtype=np.int32), rows)
        try:
            # So that kernels are compiled and workspaces allocated.
            self._step(rows, width)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        self._replays[rows, width] = self._record(lambda: self._step(rows, width))
        seconds = time.monotonic() - began
        logger.debug("recorded passes of %d rows of width %d in %.3f s", rows, width, seconds)

    def _step(self, rows: int, width: int) -> None:
        (slots, starts), observed = self._rows(rows), None
        if width == ALONE and self._observe is not None:
            self._observe(slots, 1)
            return
        if width != ANY and self._observe is not None:
            observed = self._observe(slots, width)
        tokens = self._known_tokens(slots, starts, observed)
        if observed is not None and self._states is None:
            self._states = observed.new_zeros(self._batch.num_slots, observed.shape[1])
        if width == ANY and self._states is not None:
            tokens = tokens._replace(states=self._states[:rows])
        drafts = self._propose(tokens)
        self._long_slots[:rows].copy_(tokens.slots)
        self._token_ids[:rows].copy_(drafts.token_ids)
        self._counts[:rows].copy_(drafts.counts)
