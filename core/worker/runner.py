"""The model runner: launches one step per plan. Runs on the launch thread alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace as replace_fields
from torch import nn

from ..nn.context import ForwardContext
from ..nn.step_operations.sampling import SampleOutputs
from ..parallel.ranks import ONE_RANK, Ranks
from ..protocols.attention import PagedBackend
from ..protocols.models import HiddenStates
from ..step import NOTHING_IN_PROCESS, InProcess, StepPlan
from .batch import LogitRows, PersistentBatch, StepInputs, StepRows, releasing_all
from .graphs.decode_graphs import DecodeGraphs
from .graphs.draft_graphs import DraftGraphs
from .graphs.endings import Ending
from .graphs.mixed_graphs import MixedGraphs
from .graphs.recorder import NotRecorded
from .graphs.written_tokens import TokenPlace, WrittenTokens
from .hidden_states import take
from .kv_cache.planned_compactions import PlannedCompactions
from .kv_cache.query_ring import QueryRing
from .kv_cache.sources import Sources
from .kv_cache.states import States
from .launched_step import LOGPROB_FIELDS, LaunchedStep, PromptScores
from .packing import to_host
from .parts import PerSlot, update_parts
from .pipeline_stage import PipelineStage
from .sampling.logprobs import Logprobs
from .sampling.masks import GrammarMasks, TokenMask
from .sampling.prompt_logprobs import PromptLogprobs
from .sampling.sampler import Sampler
from .sampling.sampling_state import SamplingState
from .speculation.drafting import DraftCounts, DraftedRows, Drafting

logger = logging.getLogger("jackfield.worker")


class SamplingRows(NamedTuple):
    """The positions of a step that are sampled by torch operations, outside a recorded step. S of
    them: several of a row that has drafts."""

    rows: list[int]
    """[S] The plan's row."""
    slots_host: list[int]
    """[S]"""
    slots: torch.Tensor
    """[S] int64, on the device"""
    lengths: torch.Tensor
    """[S] int64: tokens before the one that is sampled"""


class Sampled(NamedTuple):
    """What a step has sampled."""

    rows: Sequence[int]
    """The plan's row of each position."""
    tensors: dict[str, torch.Tensor]
    """For the host, on the device: `chosen` [positions or more], and LOGPROB_FIELDS if a row has
    log-probabilities."""
    logprob_rows: dict[int, int]
    """Row of the plan → k, for rows with log-probabilities."""
    place: TokenPlace | None = None
    """Where the step itself writes `chosen` for the host."""


class ModelRunner:
    """Turns plans into launches: batch, forward, sampling, copies back."""

    def __init__(
        self,
        *,
        model: nn.Module,
        backend: PagedBackend,
        batch: PersistentBatch,
        sampling: SamplingState,
        sampler: Sampler,
        vocab_size: int,
        device: torch.device,
        masks: GrammarMasks,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.model = model
        self.backend = backend
        self.batch = batch
        self.sampling = sampling
        self.sampler = sampler
        self.vocab_size = vocab_size
        self.device = device
        self.masks = masks
        self.prompt_logprobs = PromptLogprobs(batch.table, sampler, self.logits, vocab_size)
        self.parts: tuple[PerSlot, ...] = (sampler, masks, self.prompt_logprobs)
        """All that the runner remembers of slots."""
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.draft_graphs: DraftGraphs | None = None
        self.written: WrittenTokens | None = None
        """Tokens of recorded steps, where these write them to the host."""
        self.compactions: PlannedCompactions | None = None
        """Set with KV compression."""
        sampler.divide(model, ranks)
        self.divided = ranks.size > 1
        """Whether other ranks compute parts of the model."""
        self.record_errors = RuntimeError if ranks.tensor.size == 1 else NotRecorded
        """What a failed recording raises. Another error may be that of one rank alone, while the
        others wait for it."""
        self.query_ring: QueryRing | None = None
        """Set with a KV compressor that needs queries."""
        self.states: States | None = None
        """Set if layers keep states."""
        self.sources: Sources | None = None
        """Set if layers attend to sources."""
        self.drafting: Drafting | None = None
        """Set with speculative decoding."""
        self.stage: PipelineStage | None = None
        """Set if other ranks have some of the layers."""
        self.precompiling = False
        """Whether kernels are only compiled, not run."""

    def divide_by_layers(self, stage: PipelineStage) -> None:
        """Compute one stage of the model's. Only the last samples."""
        self.stage = stage
        if not stage.pipeline.last:
            self.parts = ()

    @property
    def samples(self) -> bool:
        """Whether this rank computes logits and samples."""
        return self.stage is None or self.stage.pipeline.last

    @torch.inference_mode()
    def launch(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> LaunchedStep:
        """Queue one step on the device and return at once."""
        launched = time.monotonic()
        self.update_slots(plan, in_process)
        # Layers that keep states may all be on other stages.
        assert self.states is not None or self.stage is not None or not plan.state_loads
        if self.states is not None:
            self.states.load(plan.state_loads)
        if plan.encode:
            assert self.sources is not None, "a source to encode, without an encoder"
            self.sources.encode(plan.encode)
        assert not plan.compactions, "compact() comes first"
        step = self._launch(plan)
        step.launched = launched
        if self.states is not None:
            self.states.save(plan.state_saves)
        if self.compactions is not None:
            self.compactions.report(step)
        return step

    @torch.inference_mode()
    def compact(self, plan: StepPlan) -> StepPlan:
        """Queue a plan's compactions. Return the plan without them, for `launch`."""
        if not plan.compactions:
            return plan
        assert self.compactions is not None, "a compaction, without KV compression"
        # Apart from the other writes of the plan, so that its rows may be replayed as any others.
        shortened = replace_fields(plan, starts=(), table_writes=())
        self.compactions.run(plan.compactions, lambda: self.batch.write(shortened))
        return replace_fields(plan, compactions=())

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue the rows of a step."""
        if plan.num_drafts:
            return self._launch_drafts(plan)
        if self.stage is not None:
            self.stage.begin(plan)
        if self.graphs is not None and self.graphs.is_decode_step(plan):
            step = self._replay(plan, self.graphs)
            if step is not None:
                return step
        writes = self.batch.table.writes(plan)
        rows = self.batch.rows(plan)
        if self.mixed_graphs is not None:
            step = self._replay_mixed(plan, rows, writes, self.mixed_graphs)
            if step is not None:
                return step
        inputs = self.batch.lay_out(rows, LogitRows.sampled(rows, plan.samples), writes)
        self._upload()
        hidden = self.forward(inputs)
        if not self.samples:
            return self._send_states(plan, hidden)
        if not inputs.logit_rows:
            scores = self.prompt_logprobs.score(rows, hidden)
            return self._copy_back(plan, scores)
        scores = self.prompt_logprobs.score(rows, hidden)
        rows_host = [plan.slots[row] for row in inputs.logit_rows]
        slots, lengths = inputs.sample_slots, inputs.sample_lengths
        if self.sampler.shard is not None and self._ending(rows_host) is Ending.PLAIN:
            logits = self.logits(take(hidden, inputs.logit_tokens), Ending.PLAIN)
            out = self.sampler.outputs.first(len(rows_host))
            self.sampler.shard.sample_plain(logits, slots, lengths, out)
            sampled = Sampled(inputs.logit_rows, {"chosen": out.chosen}, {})
            return self._copy_back(plan, scores, sampled)
        logits = self.logits(take(hidden, inputs.logit_tokens))
        sampling = SamplingRows(inputs.logit_rows, rows_host, slots, lengths)
        return self._sample(plan, logits, sampling, scores)

    def _launch_drafts(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step whose rows have drafts: the forward pass from a recorded graph where one
        serves it, as of prompts."""
        assert self.drafting is not None, "drafts, without speculative decoding"
        step = self._replay_drafts(plan)
        if step is not None:
            return step
        writes = self.batch.table.writes(plan)
        rows = self.batch.rows(plan)
        if self._launch_mixed(rows, writes):
            assert self.mixed_graphs is not None, "it was just used"
            hidden = self.mixed_graphs.states
        else:
            logits = LogitRows.sampled(rows, plan.samples)
            hidden = self.forward(self.batch.lay_out(rows, logits, writes))
        self._upload()
        scores = self.prompt_logprobs.score(rows, hidden)
        drafted = self.drafting.rows(plan, rows)
        slots_host = [plan.slots[row] for row in drafted.logit_rows]
        sampling = SamplingRows(drafted.logit_rows, slots_host, drafted.slots, drafted.lengths)
        drafted_logits = self.logits(take(hidden, drafted.logit_tokens))
        return self._sample(plan, drafted_logits, sampling, scores, drafted)

    def _replay_drafts(self, plan: StepPlan) -> LaunchedStep | None:
        """Run a step from a graph of rows with drafts; None if none serves it."""
        graphs, rows_host = self.draft_graphs, list(plan.slots)
        if graphs is None or (ending := self._ending(rows_host)) is Ending.LOGITS:
            return None
        self._upload()
        if not graphs.launch(plan, ending):
            return None
        rows = list(range(len(rows_host)))
        positions = [row for row in rows for _ in range(graphs.width)]
        slots = [rows_host[row] for row in positions]
        outputs = graphs.outputs.first(len(positions))
        sampled = self._recorded(outputs, positions, slots)
        sampled.tensors["verdicts"] = graphs.verdicts[: len(rows)]
        drafted = DraftCounts(rows, [graphs.width - 1] * len(rows))
        return self._copy_back(plan, sampled=sampled, drafted=drafted)

    def _launch_mixed(self, rows: StepRows, writes: np.ndarray) -> bool:
        """Queue the forward pass of a step from a recorded graph; False, with nothing done, if none
        serves it."""
        if self.mixed_graphs is None:
            return False
        try:
            return self.mixed_graphs.launch(rows, writes)
        except self.record_errors:
            logger.exception("a step with prompts cannot be recorded; such steps are launched")
            self.mixed_graphs = None
            return False

    def _replay_mixed(
        self,
        plan: StepPlan,
        rows: StepRows,
        writes: np.ndarray,
        graphs: MixedGraphs,
    ) -> LaunchedStep | None:
        """Launch a step with prompts from recorded graphs; None, with nothing done, if none serves
        it."""
        if not self._launch_mixed(rows, writes):
            return None
        if not self.samples:
            return self._send_states(plan, graphs.states)
        # Runs while the device computes.
        self._upload()
        scores = self.prompt_logprobs.score(rows, graphs.states)
        sample_rows = list(compress(range(len(plan.samples)), plan.samples))
        if not sample_rows:
            return self._copy_back(plan, scores)
        rows_host = list(compress(plan.slots, plan.samples))
        ending = self._ending(rows_host)
        # Rows that do not sample are padding there.
        num_rows = sample_rows[-1] + 1
        graphs.finish(num_rows, ending)
        if ending is not Ending.LOGITS:
            sampled = self._recorded(graphs.outputs, sample_rows, rows_host, self.written)
            return self._copy_back(plan, scores, sampled)
        slots, lengths = graphs.sampling_inputs(num_rows)
        logits = graphs.logits[:num_rows]
        if len(sample_rows) < num_rows:
            index = torch.tensor(sample_rows, pin_memory=True).to(self.device, non_blocking=True)
            slots, lengths, logits = slots[index], lengths[index], logits[index]
        sampling = SamplingRows(sample_rows, rows_host, slots, lengths)
        return self._sample(plan, logits, sampling, scores)

    def _replay(self, plan: StepPlan, graphs: DecodeGraphs) -> LaunchedStep | None:
        """Run the step from a recorded graph; None if it is not a plain decode step."""
        rows, rows_host = list(range(len(plan.slots))), list(plan.slots)
        ending = self._ending(rows_host)
        self._upload()
        try:
            if not graphs.launch(plan, ending):
                return None
        except self.record_errors:
            logger.exception("a decode graph cannot be recorded; going on without graphs")
            self.graphs = None
            return None
        if not self.samples:
            return self._send_states(plan, graphs.logits)
        if ending is not Ending.LOGITS:
            sampled = self._recorded(graphs.outputs, rows, rows_host, self.written)
            return self._copy_back(plan, sampled=sampled)
        slots, lengths = graphs.sampling_inputs(len(rows))
        logits = graphs.logits[: len(rows)]
        sampling = SamplingRows(rows, rows_host, slots, lengths)
        return self._sample(plan, logits, sampling)

    def _send_states(self, plan: StepPlan, hidden: HiddenStates) -> LaunchedStep:
        """Let the next stage go on with a step. hidden: [plan.total_tokens or more,
        hidden_size]"""
        assert self.stage is not None, "there is a next stage"
        assert isinstance(hidden, torch.Tensor), "the last stage alone leaves layers unfinished"
        self.stage.send_states(plan, hidden)
        return self._copy_back(plan)

    def _ending(self, rows_host: list[int]) -> Ending:
        """Return the recorded ending that serves all that these slots request."""
        if not self.samples:
            return Ending.STATES
        if self.masks.rows(rows_host):
            return Ending.LOGITS
        if self.sampler.is_plain(rows_host):
            return Ending.PLAIN
        return Ending.FULL if self.sampler.recordable(rows_host) else Ending.LOGITS

    def _recorded(
        self,
        out: SampleOutputs,
        rows: list[int],
        slots_host: list[int],
        written: WrittenTokens | None = None,
    ) -> Sampled:
        """Collect the results of a recorded step. out: of its rows, or of more; written: has the
        tokens, too."""
        sampled = self._sampled(rows, slots_host, out.chosen, Logprobs(*out[1:]))
        return sampled if written is None else sampled._replace(place=written.place())

    def _sampled(
        self,
        rows: list[int],
        slots_host: list[int],
        chosen: torch.Tensor,
        logprobs: Logprobs | None,
    ) -> Sampled:
        logprob_rows = {}
        if num_logprobs := self.sampling.num_logprobs:
            places = dict(zip(slots_host, rows, strict=True))
            logprob_rows = {places[slot]: k for slot, k in num_logprobs.items() if slot in places}
        tensors = {"chosen": chosen}
        if logprob_rows and logprobs is not None:
            tensors |= {name: getattr(logprobs, name) for name in LOGPROB_FIELDS}
        return Sampled(rows, tensors, logprob_rows)

    def _sample(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        sampling: SamplingRows,
        scores: Sequence[PromptScores] = (),
        drafted: DraftedRows | None = None,
    ) -> LaunchedStep:
        """Sample from the preceding forward pass, and start the copies to the host.

        Rows with a grammar wait here for their last tokens, while the forward pass runs.
        """
        rows, slots_host = sampling.rows, sampling.slots_host
        structured = self.masks.rows(slots_host)
        mask = self.masks.fill(structured, len(rows)) if structured else None
        sampled = self._choose(logits, sampling, mask)
        counts = None
        if drafted is not None:
            assert self.drafting is not None, "drafts, without speculative decoding"
            tensors = sampled.tensors
            tensors["verdicts"] = self.drafting.verify(drafted, tensors["chosen"])
            counts = drafted.host
        step = self._copy_back(plan, scores, sampled, counts)
        if structured:
            self.masks.sampled(step, structured)
        failures = self.sampler.processors.failures(slots_host) | self.masks.failures(structured)
        step.failed = {rows[index]: reason for index, reason in failures.items()}
        step.failed_params = {
            rows[index]: constraint.failed_param
            for index, constraint in structured
            if constraint.failed_param is not None
        }
        return step

    def _choose(
        self, logits: torch.Tensor, sampling: SamplingRows, mask: TokenMask | None
    ) -> Sampled:
        """Sample, and keep the tokens for the next step."""
        rows, slots_host, slots, lengths = sampling
        if mask is not None and self.sampler.is_plain_in_torch(slots_host):
            # In place: this needs less memory than the other stages of the sampler in torch.
            self.sampler.mask(logits, mask)
            mask = None
        chosen, logprobs = self.sampler.sample_eagerly(logits, slots, slots_host, lengths, mask)
        return self._sampled(rows, slots_host, chosen, logprobs)

    def forward(self, inputs: StepInputs) -> HiddenStates:
        """→ hidden states of all tokens"""
        places = None if self.query_ring is None else self.query_ring.places(inputs)
        context = ForwardContext.of(
            self.backend, inputs.layouts, inputs.positions, precompiling=self.precompiling,
            query_places=places,
            source=None if self.sources is None else self.sources.context(inputs),
            incoming=None if self.stage is None else self.stage.states_in(inputs.input_ids),
        )  # fmt: skip
        hidden: HiddenStates = self.model(inputs.input_ids, context)
        return hidden

    def logits(self, hidden: HiddenStates, ending: Ending = Ending.LOGITS) -> torch.Tensor:
        """Hidden states of some rows, may be overwritten → [num_rows, vocab_size], or the part of
        it that this rank samples plain rows from; of a stage that does not sample, the states
        themselves."""
        if ending is Ending.STATES:
            assert isinstance(hidden, torch.Tensor), "the last stage alone leaves layers unfinished"
            return hidden
        if ending is Ending.PLAIN and self.sampler.shard is not None:
            return self.sampler.shard.logits(self.model.compute_logits, hidden)  # type: ignore
        logits: torch.Tensor = self.model.compute_logits(hidden)  # type: ignore[operator]
        return logits[:, : self.vocab_size]

    def update_slots(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Update what is remembered of the slots that the plan releases and starts."""
        if self.compactions is not None:
            self.compactions.forget(plan.released)
        self.batch.table.shorten(plan.rejections)
        update_parts(self.parts, plan, in_process)

    def _upload(self) -> None:
        for part in self.parts:
            part.upload()

    def forget_slots(self) -> None:
        """Reset the state of all slots. Called between steps."""
        self.update_slots(releasing_all(self.batch.num_slots))
        self.masks.forget_steps()
        self.batch.table.forget_rows()

    def _copy_back(
        self,
        plan: StepPlan,
        scores: Sequence[PromptScores] = (),
        sampled: Sampled | None = None,
        drafted: DraftCounts | None = None,
    ) -> LaunchedStep:
        """Propose drafts, and start the copies to the host; no synchronisation."""
        rows, output, logprob_rows, place = sampled or Sampled([], {}, {})
        proposal_rows: list[int] = []
        if self.drafting is not None:
            proposal_rows = self.drafting.proposal_rows(plan)
            if proposal_rows:
                proposed = self.drafting.propose([plan.slots[row] for row in proposal_rows])
                if proposed is None:
                    proposal_rows = []
                else:
                    output["proposed"] = proposed
        if self.stage is not None and rows:
            self.stage.send_tokens(output["chosen"], rows)
        keep: list[Any] = [output, scores]
        event = None
        if len(output) > 1:
            place = None  # Tokens come with the rest, in one copy.
        # The next step overwrites these buffers.
        copies = to_host(output) if place is None else {}
        if self.device.type == "cuda":
            scores = [replace(each, tables=to_host(each.tables)) for each in scores]
            event = torch.cuda.Event()
            event.record()
        return LaunchedStep(
            plan, rows, logprob_rows, copies, scores, event, place=place, keep=keep,
            drafted=drafted, proposal_rows=proposal_rows,
        )  # fmt: skip
