"""A runner's recorded steps, and when they are recorded."""

from __future__ import annotations

import logging
import time

import torch

from ...parallel.ranks import Ranks
from ..graphs.decode_graphs import DecodeGraphs
from ..graphs.draft_graphs import DraftGraphs
from ..graphs.endings import recorded_endings
from ..graphs.mixed_graphs import MixedGraphs
from ..graphs.recorder import CountedRecorder, Recorder
from ..graphs.written_tokens import written_tokens
from ..parts.drafted_route import DraftedRoute
from ..parts.speculation import Speculation
from ..parts.states import States
from ..runner import ModelRunner

logger = logging.getLogger("jackfield.worker")

FIRST_PROMPT = 128
"""Tokens of the prompt recorded first."""
MIXED_TOGETHER = 2
"""Mixed-step items recorded per decode step."""
RECORDING_SECONDS = 1.7
"""Seconds of further recording before readiness; the rest follows in spare time."""


class StepGraphs:
    """Records a few steps at the start, others in spare time."""

    def __init__(
        self, runner: ModelRunner, record: Recorder, max_tokens: int, ranks: Ranks
    ) -> None:
        """max_tokens: of any step."""
        self._runner = runner
        self._ranks = ranks
        self._record = CountedRecorder(record)
        batch = runner.batch
        operations = batch.operations
        endings = self._endings = recorded_endings(runner.sampler, runner.samples)
        written = self._written = written_tokens(operations, batch.num_slots, batch.device)
        self.decode = DecodeGraphs(
            forward=runner.forward,
            logits=runner.logits,
            batch=batch,
            sampler=runner.sampler,
            operations=operations,
            record=self._record,
            endings=endings,
            written=written,
        )
        self.mixed: MixedGraphs | None = None
        """None if steps with prompts cannot be recorded."""
        mixes_states = operations.mixed_states or runner.parts.find(States) is None
        if runner.backend.mixed_graph_safe and mixes_states:
            self.mixed = MixedGraphs(
                forward=runner.forward,
                logits=runner.logits,
                batch=batch,
                backend=runner.backend,
                sampler=runner.sampler,
                record=self._record,
                max_tokens=max_tokens,
                endings=endings,
                errors=runner.record_errors,
                # States of the stage before have arrived by then, and would be overwritten.
                in_traffic=runner.stage is None,
                written=written,
            )

        routes = (route for route in runner.routes if isinstance(route, DraftedRoute))
        self._drafted = next(routes, None)
        self.drafts: DraftGraphs | None = None
        """None without drafts, or if `mixed` is."""
        speculation = runner.parts.find(Speculation)
        if speculation is not None and self.mixed is not None:
            self.drafts = DraftGraphs(
                forward=runner.forward,
                logits=runner.logits,
                batch=batch,
                sampler=runner.sampler,
                verified=speculation.verified,
                record=self._record,
                max_tokens=max_tokens,
            )

    @property
    def num_recorded(self) -> int:
        mixed = 0 if self.mixed is None else self.mixed.num_recorded
        drafts = 0 if self.drafts is None else self.drafts.num_recorded
        return self.decode.num_recorded + mixed + drafts

    @property
    def num_failures(self) -> int:
        return self._record.num_failures

    def record_first(self, device: torch.device) -> None:
        """Record the first requests' needs, then more for `RECORDING_SECONDS`; the runner then uses
        graphs.
        """
        runner = self._runner
        try:
            self.decode.record(1, self._endings[0])
            runner.decode.graphs, runner.written = self.decode, self._written
            if self.mixed is not None:
                self.mixed.record_for(FIRST_PROMPT)
                if runner.batch.num_drafts:
                    self.mixed.record_for(1 + runner.batch.num_drafts)
                runner.mixed.graphs = self.mixed
            if self._drafted is not None:
                self._drafted.graphs = self.drafts
            self._record_drafts()
            end = time.monotonic() + RECORDING_SECONDS
            while self._ranks.all(time.monotonic() < end, device):
                if not self.record_next():
                    break
        except runner.record_errors:
            logger.exception("steps cannot be recorded here; going on without graphs")

    def _record_drafts(self) -> bool:
        """Record a step with drafts; return whether more are left."""
        drafts = None if self._drafted is None else self._drafted.graphs
        missing = [] if drafts is None else drafts.missing()
        if drafts is not None and missing:
            drafts.record(*missing[0])
        return len(missing) > 1

    def record_next(self) -> bool:
        """Record one more of each kind; False: none is left."""
        decode, mixed = self._runner.decode.graphs, self._runner.mixed.graphs
        if decode is None:
            return False
        missing = decode.missing()
        if missing:
            decode.record(*missing[0])
        more = self._record_drafts()
        for _ in range(MIXED_TOGETHER):
            more = (mixed is not None and mixed.record_next()) or more
        return more or len(missing) > 1
