"""Ways to launch a step's rows: recorded graphs, or separate launches."""

from __future__ import annotations

import logging
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..protocols.models import HiddenStates
from ..step import StepPlan
from .batch import LogitPlaces, LogitRows, StepRows
from .graphs.decode_graphs import DecodeGraphs
from .graphs.endings import Ending
from .graphs.mixed_graphs import MixedGraphs
from .hidden_states import take
from .launched_step import LaunchedStep
from .sampled import Sampled, SamplingRows

if TYPE_CHECKING:
    from .runner import ModelRunner

logger = logging.getLogger("jackfield.worker")


class DecodeRows(NamedTuple):
    """What a decode step's rows are, until slots have other requests."""

    slots: tuple[int, ...]
    slot_changes: int
    """As of `ModelRunner`."""
    ending: Ending
    sampled: Sampled
    """Without a place."""


class DecodeGraphRoute:
    """Steps whose rows all compute one token and sample, as one graph."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._rows = DecodeRows((), 0, Ending.STATES, Sampled([], {}, {}))
        """The last step's."""
        self.graphs: DecodeGraphs | None = None
        """None until steps are recorded, and once one could not be."""
        self.variants: dict[str, DecodeGraphs] = {}
        """Graphs of steps that launch other kernels because of a part, likewise."""

    def launch(self, plan: StepPlan) -> LaunchedStep | None:
        """Queue a decode step."""
        runner = self._runner
        key = runner.parts.graph_key(plan)
        graphs = self.graphs if key is None else self.variants.get(key)
        if graphs is None or not graphs.is_decode_step(plan) or not runner.parts.recordable(plan):
            return None
        rows = self._rows
        if rows.slots != plan.slots or rows.slot_changes != runner.slot_changes:
            rows = self._rows = self._rows_of(plan.slots)
        runner.upload()
        try:
            if not graphs.launch(plan, rows.ending):
                return None
        except runner.record_errors:
            logger.exception("a decode graph cannot be recorded; going on without graphs")
            self.graphs = None
            self.variants.clear()
            return None
        if not runner.samples:
            return runner.send_states(plan, graphs.logits)
        if rows.ending is not Ending.LOGITS:
            return runner.copy_back(plan, sampled=rows.sampled.written(runner.written))
        num_rows = len(plan.slots)
        slots, lengths = graphs.sampling_inputs(num_rows)
        sampling = SamplingRows(list(range(num_rows)), list(plan.slots), slots, lengths)
        return runner.sample(plan, graphs.logits[:num_rows], sampling)

    def _rows_of(self, slots: tuple[int, ...]) -> DecodeRows:
        runner, rows_host = self._runner, list(slots)
        out = runner.sampler.outputs
        sampled = runner.recorded(out, list(range(len(slots))), rows_host)
        return DecodeRows(slots, runner.slot_changes, runner.ending(rows_host), sampled)


class MixedGraphLaunch:
    """A step with prompts: forward pass and sampling from two graphs."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.graphs: MixedGraphs | None = None
        """None until steps are recorded, and once one could not be."""
        self.variants: dict[str, MixedGraphs] = {}
        """Graphs of steps that launch other kernels because of a part, likewise."""

    def serving(self, plan: StepPlan) -> MixedGraphs | None:
        """Return the graphs for a plan of its kind; None: it must be launched."""
        parts = self._runner.parts
        if not parts.recordable(plan):
            return None
        key = parts.graph_key(plan)
        return self.graphs if key is None else self.variants.get(key)

    def forward(self, plan: StepPlan, rows: StepRows, writes: np.ndarray) -> HiddenStates | None:
        """Queue the forward pass of a step; None, with nothing done, if no graph serves it."""
        if (graphs := self.serving(plan)) is None:
            return None
        try:
            return graphs.states if graphs.launch(rows, writes) else None
        except self._runner.record_errors:
            logger.exception("a step with prompts cannot be recorded; such steps are launched")
            self.graphs = None
            self.variants.clear()
            return None

    def launch(self, plan: StepPlan, rows: StepRows, writes: np.ndarray) -> LaunchedStep | None:
        """Queue a step, of which slots and rows are known."""
        runner, graphs = self._runner, self.serving(plan)
        if graphs is None or self.forward(plan, rows, writes) is None:
            return None
        if not runner.samples:
            return runner.send_states(plan, graphs.states)
        # Runs while the device computes.
        runner.upload()
        scores = runner.prompt_logprobs.score(rows, graphs.states)
        sample_rows = list(compress(range(len(plan.samples)), plan.samples))
        if not sample_rows:
            return runner.copy_back(plan, scores)
        rows_host = list(compress(plan.slots, plan.samples))
        ending = runner.ending(rows_host)
        # Rows that do not sample are padding there.
        num_rows = sample_rows[-1] + 1
        graphs.finish(num_rows, ending)
        if ending is not Ending.LOGITS:
            sampled = runner.recorded(graphs.outputs, sample_rows, rows_host)
            return runner.copy_back(plan, scores, sampled.written(runner.written))
        slots, lengths = graphs.sampling_inputs(num_rows)
        logits = graphs.logits[:num_rows]
        if len(sample_rows) < num_rows:
            index = torch.tensor(sample_rows, pin_memory=True)
            index = index.to(runner.device, non_blocking=True)
            slots, lengths, logits = slots[index], lengths[index], logits[index]
        return runner.sample(
            plan, logits, SamplingRows(sample_rows, rows_host, slots, lengths), scores
        )


class RowsRoute:
    """Any step, from graphs if possible."""

    def __init__(self, runner: ModelRunner, mixed: MixedGraphLaunch) -> None:
        self._runner, self._mixed = runner, mixed

    def launch(self, plan: StepPlan) -> LaunchedStep:
        runner = self._runner
        batch = runner.batch
        writes = batch.table.writes(plan)
        rows = batch.rows(plan)
        step = self._mixed.launch(plan, rows, writes)
        if step is not None:
            return step
        inputs = batch.lay_out(rows, LogitRows.sampled(rows, plan.samples), writes)
        runner.upload()
        hidden = runner.forward(inputs)
        if not runner.samples:
            return runner.send_states(plan, hidden)
        scores = runner.prompt_logprobs.score(rows, hidden)
        if not inputs.logit_rows:
            return runner.copy_back(plan, scores)
        rows_host = [plan.slots[row] for row in inputs.logit_rows]
        slots, lengths = inputs.sample_slots, inputs.sample_lengths
        places = LogitPlaces(slots, lengths, rows_host)
        shard = runner.sampler.shard
        if shard is not None and runner.ending(rows_host) is Ending.PLAIN:
            logits = runner.logits(take(hidden, inputs.logit_tokens), Ending.PLAIN, places)
            out = runner.sampler.outputs.first(len(rows_host))
            shard.sample_plain(logits, slots, lengths, out)
            sampled = Sampled(inputs.logit_rows, {"chosen": out.chosen}, {})
            return runner.copy_back(plan, scores, sampled)
        logits = runner.logits(take(hidden, inputs.logit_tokens), places=places)
        sampling = SamplingRows(inputs.logit_rows, rows_host, slots, lengths)
        return runner.sample(plan, logits, sampling, scores)
