"""Launches a step per plan. Launch thread only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from ..nn.context import ForwardContext
from ..nn.step_operations.sampling import SampleOutputs
from ..parallel.ranks import ONE_RANK, Ranks
from ..protocols.attention import PagedBackend
from ..protocols.models import HiddenStates
from ..step import NOTHING_IN_PROCESS, InProcess, StepPlan
from .batch import LogitPlaces, PersistentBatch, StepInputs, releasing_all
from .graphs.endings import Ending
from .graphs.recorder import NotRecorded
from .graphs.written_tokens import WrittenTokens
from .launched_step import LOGPROB_FIELDS, DraftCounts, EmptyStep, LaunchedStep, PromptScores
from .packing import to_host
from .parts.part import Route, WorkerPart
from .parts.part_set import WorkerParts
from .parts.pipeline import PipelineStage
from .per_slot import PerSlot, update_slots
from .routes import DecodeGraphRoute, MixedGraphLaunch, RowsRoute
from .sampled import Sampled, SamplingRows
from .sampling.logprobs import Logprobs
from .sampling.masks import GrammarMasks, TokenMask
from .sampling.prompt_logprobs import PromptLogprobs
from .sampling.rejection import DrawnDrafts
from .sampling.rounds import DraftPlaces, sample_in_rounds
from .sampling.sampler import Sampler
from .sampling.sampling_state import SamplingState


class Drafted(Protocol):
    """The drafts of a step's sampling rows."""

    counts: DraftCounts

    def limit(self, limits: torch.Tensor) -> None:
        """Let so many drafts of each row be accepted at most, [S] int32."""

    def places(self) -> DraftPlaces | None:
        """Return what sampling in rounds needs; None: all positions are sampled at once."""

    @property
    def drawn(self) -> DrawnDrafts | None:
        """Drafts that are accepted by what they were drawn from; None: while they are sampled."""

    def verify(self, chosen: torch.Tensor) -> torch.Tensor:
        """Accept drafts. chosen: [L] int32 → [S, 2] int32: accepted and proposed drafts"""


class ModelRunner:
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
        parts: Sequence[WorkerPart] = (),
    ) -> None:
        """parts: in calling order."""
        self.model = model
        self.backend = backend
        self.batch = batch
        self.sampling = sampling
        self.sampler = sampler
        self.vocab_size = vocab_size
        self.device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        """What steps are launched on."""
        self.masks = masks
        self.prompt_logprobs = PromptLogprobs(
            batch.table, sampler, lambda hidden, places: self.logits(hidden, places=places),
            vocab_size,
        )  # fmt: skip
        sampler.divide(model, ranks)
        self.record_errors = RuntimeError if ranks.tensor.size == 1 else NotRecorded
        """Errors of a failed recording; another may be of one rank only, while others wait for
        it."""
        self.parts = WorkerParts(parts)
        self._inference = torch.inference_mode()
        """Made once, as each launch enters it."""
        self.slot_changes = 0
        """Plans by which slots got or lost their requests."""
        self.stage = self.parts.find(PipelineStage)
        """Exchange with other stages; None with one stage."""
        if self.stage is not None:
            self.stage.on_verified = self.parts.drafts_verified
        samplers: tuple[PerSlot, ...] = (sampler, masks, self.prompt_logprobs)
        self._per_slot = (*(samplers if self.samples else ()), *self.parts.per_slot)
        self._uploads = [each for each in self._per_slot if type(each).upload is not PerSlot.upload]
        self.decode, self.mixed = DecodeGraphRoute(self), MixedGraphLaunch(self)
        self.written: WrittenTokens | None = None
        """Host memory for recorded steps' tokens, if supported."""
        own = [route for part in parts for route in part.routes(self)]
        self.routes: tuple[Route, ...] = (*own, self.decode, RowsRoute(self, self.mixed))
        """Ways to launch; the first that serves a step is used."""
        self.precompiling = False
        """Whether kernels are only compiled."""

    @property
    def samples(self) -> bool:
        return self.stage is None or self.stage.pipeline.last

    def launch(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> LaunchedStep:
        """Queue a step, without waiting."""
        with self._inference:
            return self._launch(plan, in_process)

    def _launch(self, plan: StepPlan, in_process: InProcess) -> LaunchedStep:
        launched = time.monotonic()
        self.update_slots(plan, in_process)
        if self.stage is not None:
            self.stage.receive_inputs(plan)
        self.parts.before(plan)
        for route in self.routes:
            if (step := route.launch(plan)) is not None:
                break
        else:
            raise AssertionError("the last route serves all steps")
        step.launched = launched
        self.parts.after(plan, step)
        return step

    @torch.inference_mode()
    def write(self, plan: StepPlan, in_process: InProcess) -> EmptyStep:
        self.update_slots(plan, in_process)
        self.parts.before(plan)
        self.batch.write(plan)
        return EmptyStep(plan, self.parts.poll())

    def send_states(self, plan: StepPlan, hidden: HiddenStates) -> LaunchedStep:
        """Pass a step to the next stage. hidden: [plan.total_tokens or more, hidden_size]"""
        assert self.stage is not None, "there is a next stage"
        assert isinstance(hidden, torch.Tensor), "the last stage alone leaves layers unfinished"
        self.stage.send_states(plan, hidden)
        return self.copy_back(plan)

    def ending(self, rows_host: list[int]) -> Ending:
        """Return the ending that serves these slots' requests."""
        if not self.samples:
            return Ending.STATES
        if self.masks.rows(rows_host):
            return Ending.LOGITS
        if self.sampler.is_plain(rows_host):
            return Ending.PLAIN
        return Ending.FULL if self.sampler.recordable(rows_host) else Ending.LOGITS

    def recorded(self, out: SampleOutputs, rows: list[int], slots_host: list[int]) -> Sampled:
        """Collect a recorded step's results. out: of at least its rows."""
        return self._sampled(rows, slots_host, out.chosen, Logprobs(*out[1:]))

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

    def sample(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        sampling: SamplingRows,
        scores: Sequence[PromptScores] = (),
        *,
        drafted: Drafted | None = None,
    ) -> LaunchedStep:
        """Sample after the forward pass, and start copies to the host.

        drafted: for drafts. Rows with a grammar wait for their last tokens, during the forward
        pass.
        """
        rows, slots_host = sampling.rows, sampling.slots_host
        if drafted is not None:
            rows = drafted.counts.rows
            slots_host = [plan.slots[row] for row in rows]
        structured = self.masks.rows(slots_host)
        mask = None
        if structured and drafted is None:
            mask = self.masks.fill(structured, len(rows))
        elif structured and drafted is not None:
            mask, limits = self.masks.fill_along(structured, drafted.counts.counts)
            drafted.limit(limits)
        sampled = self._choose(logits, sampling, mask, drafted)
        if drafted is not None:
            verdicts = sampled.tensors["verdicts"] = drafted.verify(sampled.tensors["chosen"])
            self.parts.drafts_verified(plan, verdicts[:, 0])
        counts = None if drafted is None else drafted.counts
        step = self.copy_back(plan, scores, sampled, counts)
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
        self,
        logits: torch.Tensor,
        sampling: SamplingRows,
        mask: TokenMask | None,
        drafted: Drafted | None,
    ) -> Sampled:
        """Sample, keeping tokens for the next step."""
        rows, slots_host, slots, lengths = sampling
        places = None if drafted is None else drafted.places()
        if places is not None:
            out = sample_in_rounds(self.sampler, logits, slots, slots_host, lengths, mask, places)
            return self._sampled(rows, slots_host, *out)
        if mask is not None and self.sampler.is_plain_in_torch(slots_host):
            # In place: this needs less memory than the other stages of the sampler in torch.
            self.sampler.mask(logits, mask)
            mask = None
        drawn = None if drafted is None else drafted.drawn
        chosen, logprobs = self.sampler.sample_eagerly(
            logits, slots, slots_host, lengths, mask, drawn
        )
        return self._sampled(rows, slots_host, chosen, logprobs)

    def forward(self, inputs: StepInputs) -> HiddenStates:
        context = ForwardContext.of(
            self.backend, inputs.layouts, inputs.positions, precompiling=self.precompiling,
            parts=self.parts.context(inputs),
        )  # fmt: skip
        hidden: HiddenStates = self.model(inputs.input_ids, context)
        if self.samples:
            self.parts.computed(inputs, hidden)
        return hidden

    def logits(
        self,
        hidden: HiddenStates,
        ending: Ending = Ending.LOGITS,
        places: LogitPlaces | None = None,
    ) -> torch.Tensor:
        """Return the logits of these rows' hidden states, which may be overwritten: [num_rows,
        vocab_size]. Where ranks share the sampling of plain rows, the columns of this rank; in a
        stage that does not sample, the states unchanged. places: whose they are; None: of no
        request."""
        self.parts.logit_rows(places)
        if ending is Ending.STATES:
            assert isinstance(hidden, torch.Tensor), "the last stage alone leaves layers unfinished"
            return hidden
        if ending is Ending.PLAIN and self.sampler.shard is not None:
            return self.sampler.shard.logits(self.model.compute_logits, hidden)  # type: ignore[arg-type]
        logits: torch.Tensor = self.model.compute_logits(hidden)  # type: ignore[operator]
        return logits[:, : self.vocab_size]

    def update_slots(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        if plan.released or plan.starts:
            self.slot_changes += 1
            update_slots(self._per_slot, plan, in_process)
        if self.batch.prefixes is not None:
            self.batch.prefixes.follow(plan)

    def upload(self) -> None:
        for each in self._uploads:
            each.upload()

    def forget_slots(self) -> None:
        """Reset all slots between steps."""
        self.update_slots(releasing_all(self.batch.num_slots))
        self.masks.forget_steps()
        self.batch.table.forget_rows()

    def copy_back(
        self,
        plan: StepPlan,
        scores: Sequence[PromptScores] = (),
        sampled: Sampled | None = None,
        drafted: DraftCounts | None = None,
    ) -> LaunchedStep:
        """Start asynchronous copies to the host."""
        rows, output, logprob_rows, place = sampled or Sampled([], {}, {})
        self.parts.sampled(plan, output, rows)
        keep: list[Any] = [output, scores]
        event = None
        if len(output) > 1:
            place = None  # Tokens come with the rest, in one copy.
        # The next step overwrites these buffers.
        copies = to_host(output) if place is None else {}
        if self._stream is not None:
            scores = [replace(each, tables=to_host(each.tables)) for each in scores]
            event = torch.cuda.Event()
            event.record(self._stream)
        return LaunchedStep(
            plan, rows, logprob_rows, copies, scores, event, place=place, keep=keep,
            drafted=drafted,
        )  # fmt: skip
