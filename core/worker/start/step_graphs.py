"""A runner's recorded steps, and when they are recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from ...parallel.ranks import Ranks
from ...protocols.models import HiddenStates
from ..batch import LogitPlaces, StepInputs
from ..graphs.decode_graphs import DecodeGraphs
from ..graphs.draft_graphs import DraftGraphs
from ..graphs.endings import Ending, recorded_endings
from ..graphs.mixed_graphs import MixedGraphs
from ..graphs.recorder import CountedRecorder, Recorder
from ..graphs.step_costs import StepCosts
from ..graphs.written_tokens import WrittenTokens, written_tokens
from ..parts.drafted_route import DraftedRoute
from ..parts.input_embeds import InputEmbeds
from ..parts.speculation import Speculation
from ..parts.states import States
from ..runner import ModelRunner

logger = logging.getLogger("jackfield.worker")

FIRST_PROMPT = 128
"""Tokens of the prompt recorded first."""
MIXED_TOGETHER = 2
"""Mixed-step items recorded per decode step."""
RECORDING_SECONDS = 1.7
"""Spent on recording more of each variant before the engine is ready; the rest is recorded in spare
time."""


class Variant:
    """The recorded steps of one kind: plain ones, or those that launch other kernels because of a
    part (`WorkerPart.variants`)."""

    def __init__(
        self,
        runner: ModelRunner,
        name: str | None,
        record: Recorder,
        max_tokens: int,
        written: WrittenTokens | None,
    ) -> None:
        """name: None for plain steps. Nothing is recorded yet."""
        batch = runner.batch
        operations = batch.operations
        endings = recorded_endings(runner.sampler, runner.samples)
        # With stages, states of the one before have arrived by then, and would be overwritten.
        in_traffic = runner.stage is None

        def forward(inputs: StepInputs) -> HiddenStates:
            with runner.parts.recording(name):
                return runner.forward(inputs)

        def logits(hidden: HiddenStates, ending: Ending, places: LogitPlaces) -> torch.Tensor:
            with runner.parts.recording(name):
                return runner.logits(hidden, ending, places)

        self.name = name
        self.decode = DecodeGraphs(
            forward=forward,
            logits=logits,
            batch=batch,
            sampler=runner.sampler,
            operations=operations,
            record=record,
            endings=endings,
            errors=runner.record_errors,
            in_traffic=in_traffic,
            written=written,
        )
        self.mixed: MixedGraphs | None = None
        """None: the attention backend, or layers that keep states, do not support recording steps
        with prompts."""
        mixes_states = operations.mixed_states or runner.parts.find(States) is None
        if runner.backend.mixed_graph_safe and mixes_states:
            self.mixed = MixedGraphs(
                forward=forward,
                logits=logits,
                batch=batch,
                backend=runner.backend,
                sampler=runner.sampler,
                record=record,
                max_tokens=max_tokens,
                endings=endings,
                errors=runner.record_errors,
                in_traffic=in_traffic,
                written=written,
            )
        self.drafts: tuple[DraftGraphs, ...] = ()
        """By the drafts of each row. Empty: rows have none, they change states, nothing is sampled
        in this stage, or steps with prompts are not recorded either."""
        speculation = runner.parts.find(Speculation)
        samples = runner.samples and runner.parts.find(States) is None
        if speculation is not None and samples and self.mixed is not None:
            self.drafts = tuple(
                DraftGraphs(
                    forward=forward,
                    logits=logits,
                    batch=batch,
                    sampler=runner.sampler,
                    verified=speculation.verifier.verified,
                    drawn=speculation.verifier.drawn if speculation.verifier.rejects else None,
                    record=record,
                    max_tokens=max_tokens,
                    num_drafts=num_drafts,
                )
                for num_drafts in speculation.widths
            )


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
        self._written = written_tokens(batch.operations, batch.num_slots, batch.device)
        self.plain, *self.others = (
            Variant(runner, name, self._record, max_tokens, self._written)
            for name in (None, *runner.parts.variants)
        )
        speculation = runner.parts.find(Speculation)
        self._speculation = speculation
        self.passes = None
        if speculation is not None:
            drafter, widths = speculation.drafter, speculation.widths
            self.passes = drafter.pass_graphs(self._record, widths)
        """Those of a speculator's model."""
        embeds = runner.parts.find(InputEmbeds)
        self.encoders = None if embeds is None else embeds.encoder_graphs(self._record)
        """Those of an encoder of media."""
        routes = (route for route in runner.routes if isinstance(route, DraftedRoute))
        self._drafted = next(routes, None)
        self._costs: StepCosts | None = None
        """Once all is recorded."""
        self._round: Iterator[int] | None = None
        """One recording of each kind, of which some are done."""

    @property
    def decode(self) -> DecodeGraphs:
        """Those of plain steps."""
        return self.plain.decode

    @property
    def mixed(self) -> MixedGraphs | None:
        """Those of plain steps."""
        return self.plain.mixed

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All kinds of recorded steps."""
        return self.plain, *self.others

    @property
    def num_recorded(self) -> int:
        return self._record.num_recorded

    @property
    def num_failures(self) -> int:
        return self._record.num_failures

    def record_first(self, device: torch.device) -> None:
        """Record the first requests' needs, then more for `RECORDING_SECONDS`; the runner then uses
        graphs.
        """
        runner = self._runner
        try:
            for variant in self.variants:
                self._begin(variant)
            self._record_passes()
            end = time.monotonic() + RECORDING_SECONDS * len(self.variants)
            while self._ranks.all(time.monotonic() < end, device):
                if not self.record_next():
                    break
        except runner.record_errors:
            logger.exception("steps cannot be recorded here; going on without graphs")

    def _begin(self, variant: Variant) -> None:
        """Record the first steps of a kind, which the runner uses from here on."""
        runner, name = self._runner, variant.name
        variant.decode.record(1, recorded_endings(runner.sampler, runner.samples)[0])
        runner.written = self._written
        if variant.mixed is not None:
            variant.mixed.record_for(FIRST_PROMPT)
            for drafts in variant.drafts:
                variant.mixed.record_for(drafts.width)
        if name is None:
            runner.decode.graphs, runner.mixed.graphs = variant.decode, variant.mixed
        else:
            runner.decode.variants[name] = variant.decode
            if variant.mixed is not None:
                runner.mixed.variants[name] = variant.mixed
        if self._drafted is not None:
            for drafts in variant.drafts:
                self._drafted.graphs[name, drafts.width - 1] = drafts
                drafts.record_next()

    def record_next(self) -> bool:
        """Record one more step of those that the runner uses; False: nothing is left. A request
        that comes meanwhile waits for it, so it is one at a time."""
        if self._runner.decode.graphs is None:
            return False
        for _ in range(2):
            if self._round is None:
                self._round = self._record_round()
            if next(self._round, None) is not None:
                return True
            self._round = None  # What is missing may have changed since it began.
        return False

    def _record_round(self) -> Iterator[int]:
        """Record one more of each kind, and yield after each."""
        work: list[Callable[[], object]] = [self._record_passes]
        if self.encoders is not None:
            work.append(self.encoders.record_next)
        for variant in self.variants:
            work += self._recordings(variant)
        for record in work:
            before = self.num_recorded
            record()
            if self.num_recorded > before:
                yield self.num_recorded

    def measure_next(self) -> bool:
        """Measure one more step for a speculator's widths, once all is recorded; False: nothing is
        left. With stages, steps overlap, and nothing is measured."""
        speculation, drafts = self._speculation, self.plain.drafts
        if speculation is None or not drafts or self._runner.stage is not None:
            return False
        if self._costs is None:
            passes, device = speculation.drafter.graphs, self._runner.device
            self._costs = StepCosts(self.decode, drafts, passes, device)
        cost = self._costs.measure_next()
        if cost is not None:
            speculation.costs.append(cost)
        return cost is not None

    def _record_passes(self) -> None:
        """Record one more of a speculator's model's."""
        if self.passes is None or self._speculation is None:
            return
        try:
            self.passes.record_next()
        except self._runner.record_errors as error:
            self._speculation.drafter.launch_passes(error)
        else:
            self._speculation.drafter.graphs = self.passes

    def _recordings(self, variant: Variant) -> list[Callable[[], object]]:
        """Return what records one more of each kind of a variant's steps."""
        runner, name = self._runner, variant.name
        if name is None:
            mixed = runner.mixed.graphs
        elif name in runner.decode.variants:
            mixed = runner.mixed.variants.get(name)
        else:
            return []
        drafts = [each.record_next for each in variant.drafts]
        prompts = [] if mixed is None else [mixed.record_next] * MIXED_TOGETHER
        return [variant.decode.record_next, *drafts, *prompts]
