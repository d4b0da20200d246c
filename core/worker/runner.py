"""The model runner: launches one step per plan. Runs on the launch thread alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace as replace_fields
from torch import nn

from ..nn.context import ForwardContext
from ..nn.step_operations.sampling import SampleOutputs
from ..parallel.ranks import ONE_RANK, Ranks
from ..protocols.attention import PagedBackend
from ..step import NOTHING_IN_PROCESS, InProcess, StepPlan
from .batch import LogitRows, PersistentBatch, StepInputs, StepRows, releasing_all
from .graphs.decode_graphs import DecodeGraphs
from .graphs.draft_graphs import DraftGraphs
from .graphs.endings import Ending
from .graphs.mixed_graphs import MixedGraphs
from .graphs.recorder import NotRecorded
from .kv_cache.compaction import Compactor
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
        self.compactor: Compactor | None = None
        """Set with KV compression."""
        sampler.divide(model, ranks)
        self.divided = ranks.size > 1
        """Whether other ranks compute parts of the model."""
        self.record_errors = RuntimeError if ranks.tensor.size == 1 else NotRecorded
        """What a failed recording raises. Another error may be that of one rank alone, while the
        others wait for it."""
        self.query_ring: QueryRing | None = None
        """Set with a KV compressor that needs queries."""
        self._uncompacted: dict[int, str] = {}
        """Slot → why its compaction failed, until a step has its row."""
        self._compaction_seconds: list[Callable[[], float]] = []
        """Return the time that compactions took which no step has reported yet."""
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
        step = self._launch(plan, launched)
        if self._compaction_seconds:
            times, self._compaction_seconds = self._compaction_seconds, []
            step.compaction_seconds = lambda: sum(seconds() for seconds in times)
        if self.states is not None:
            self.states.save(plan.state_saves)
        return self._fail_uncompacted(step) if self._uncompacted else step

    @torch.inference_mode()
    def compact(self, plan: StepPlan) -> StepPlan:
        """Queue a plan's compactions. Return the plan without them, for `launch`."""
        if not plan.compactions:
            return plan
        self._compaction_seconds.append(self._timed(lambda: self._compact(plan)))
        return replace_fields(plan, compactions=())

    def _compact(self, plan: StepPlan) -> None:
        assert self.compactor is not None, "a compaction, without KV compression"
        failures = self.compactor.run(plan.compactions)
        if failures and self.divided:
            # It may have failed on this rank alone, whose results are not those that are served.
            raise RuntimeError(next(iter(failures.values())))
        self._uncompacted |= failures
        # Apart from the other writes of the plan, so that its rows may be replayed as any others.
        self.batch.write(replace_fields(plan, starts=(), table_writes=()))

    def _timed(self, work: Callable[[], None]) -> Callable[[], float]:
        """Queue work; return a function that gives its seconds once the device has done it."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
            return lambda: seconds
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        return lambda: first.elapsed_time(last) / 1e3

    def _fail_uncompacted(self, step: LaunchedStep) -> LaunchedStep:
        """Fail the rows whose cache holds nothing of use since a compaction failed."""
        for row, slot in enumerate(step.plan.slots):
            if slot in self._uncompacted:
                step.failed[row] = self._uncompacted.pop(slot)
        return step

    def _launch(self, plan: StepPlan, launched: float) -> LaunchedStep:
        """Queue the rows of a step."""
        if plan.num_drafts:
            return self._launch_drafts(plan, launched)
        if self.stage is not None:
            self.stage.begin(plan)
        if self.graphs is not None and self.graphs.is_decode_step(plan):
            step = self._replay(plan, self.graphs, launched)
            if step is not None:
                return step
        writes = self.batch.table.writes(plan)
        rows = self.batch.rows(plan)
        if self.mixed_graphs is not None:
            step = self._replay_mixed(plan, rows, writes, self.mixed_graphs, launched)
            if step is not None:
                return step
        inputs = self.batch.lay_out(rows, LogitRows.sampled(rows, plan.samples), writes)
        self._upload()
        hidden = self.forward(inputs)
        if not self.samples:
            return self._send_states(plan, hidden, launched)
        if not inputs.logit_rows:
            scores = self.prompt_logprobs.score(rows, hidden)
            return self._copy_back(plan, [], {}, {}, scores, launched)
        scores = self.prompt_logprobs.score(rows, hidden)
        rows_host = [plan.slots[row] for row in inputs.logit_rows]
        slots, lengths = inputs.sample_slots, inputs.sample_lengths
        if self.sampler.shard is not None and self._ending(rows_host) is Ending.PLAIN:
            logits = self.logits(hidden[inputs.logit_tokens], Ending.PLAIN)
            out = self.sampler.outputs.first(len(rows_host))
            self.sampler.shard.sample_plain(logits, slots, lengths, out)
            chosen = {"chosen": out.chosen}
            return self._copy_back(plan, inputs.logit_rows, {}, chosen, scores, launched)
        logits = self.logits(hidden[inputs.logit_tokens])
        return self._sample(
            plan,
            logits,
            inputs.logit_rows,
            rows_host,
            slots,
            lengths,
            scores,
            launched,
        )

    def _launch_drafts(self, plan: StepPlan, launched: float) -> LaunchedStep:
        """Queue a step whose rows have drafts: the forward pass from a recorded graph where one
        serves it, as of prompts."""
        assert self.drafting is not None, "drafts, without speculative decoding"
        step = self._replay_drafts(plan, launched)
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
        return self._sample(
            plan,
            self.logits(hidden[drafted.logit_tokens]),
            drafted.logit_rows,
            [plan.slots[row] for row in drafted.logit_rows],
            drafted.slots,
            drafted.lengths,
            scores,
            launched,
            drafted,
        )

    def _replay_drafts(self, plan: StepPlan, launched: float) -> LaunchedStep | None:
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
        output, logprob_rows = self._recorded(outputs, positions, slots)
        output["verdicts"] = graphs.verdicts[: len(rows)]
        drafted = DraftCounts(rows, [graphs.width - 1] * len(rows))
        return self._copy_back(plan, positions, logprob_rows, output, [], launched, drafted)

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
        launched: float,
    ) -> LaunchedStep | None:
        """Launch a step with prompts from recorded graphs; None, with nothing done, if none serves
        it."""
        if not self._launch_mixed(rows, writes):
            return None
        if not self.samples:
            return self._send_states(plan, graphs.states, launched)
        # Runs while the device computes.
        self._upload()
        scores = self.prompt_logprobs.score(rows, graphs.states)
        sample_rows = list(compress(range(len(plan.samples)), plan.samples))
        if not sample_rows:
            return self._copy_back(plan, [], {}, {}, scores, launched)
        rows_host = list(compress(plan.slots, plan.samples))
        ending = self._ending(rows_host)
        # Rows that do not sample are padding there.
        num_rows = sample_rows[-1] + 1
        graphs.finish(num_rows, ending)
        if ending is not Ending.LOGITS:
            tensors, logprob_rows = self._recorded(graphs.outputs, sample_rows, rows_host)
            return self._copy_back(plan, sample_rows, logprob_rows, tensors, scores, launched)
        slots, lengths = graphs.sampling_inputs(num_rows)
        logits = graphs.logits[:num_rows]
        if len(sample_rows) < num_rows:
            index = torch.tensor(sample_rows, pin_memory=True).to(self.device, non_blocking=True)
            slots, lengths, logits = slots[index], lengths[index], logits[index]
        return self._sample(plan, logits, sample_rows, rows_host, slots, lengths, scores, launched)

    def _replay(self, plan: StepPlan, graphs: DecodeGraphs, launched: float) -> LaunchedStep | None:
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
            return self._send_states(plan, graphs.logits, launched)
        if ending is not Ending.LOGITS:
            tensors, logprob_rows = self._recorded(graphs.outputs, rows, rows_host)
            return self._copy_back(plan, rows, logprob_rows, tensors, [], launched)
        slots, lengths = graphs.sampling_inputs(len(rows))
        logits = graphs.logits[: len(rows)]
        return self._sample(plan, logits, rows, rows_host, slots, lengths, [], launched)

    def _send_states(self, plan: StepPlan, hidden: torch.Tensor, launched: float) -> LaunchedStep:
        """Let the next stage go on with a step. hidden: [plan.total_tokens or more,
        hidden_size]"""
        assert self.stage is not None, "there is a next stage"
        self.stage.send_states(plan, hidden)
        return self._copy_back(plan, [], {}, {}, [], launched)

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
        self, out: SampleOutputs, rows: list[int], rows_host: list[int]
    ) -> tuple[dict[str, torch.Tensor], dict[int, int]]:
        """Collect results of a recorded step → tensors for the host; row → logprobs. out: of its
        rows, or of more."""
        logprob_rows = self._logprob_rows(rows, rows_host)
        scored = _tensors(Logprobs(*out[1:])) if logprob_rows else {}
        return {"chosen": out.chosen, **scored}, logprob_rows

    def _sample(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        rows: list[int],
        rows_host: list[int],
        slots: torch.Tensor,
        lengths: torch.Tensor,
        scores: list[PromptScores],
        launched: float,
        drafted: DraftedRows | None = None,
    ) -> LaunchedStep:
        """Sample from the preceding forward pass, and start the copies to the host.

        Rows with a grammar wait here for their last tokens, while the forward pass runs.
        """
        structured = self.masks.rows(rows_host)
        mask = self.masks.fill(structured, len(rows)) if structured else None
        output, logprob_rows = self._choose(logits, rows, rows_host, slots, lengths, mask)
        counts = None
        if drafted is not None:
            assert self.drafting is not None, "drafts, without speculative decoding"
            output["verdicts"] = self.drafting.verify(drafted, output["chosen"])
            counts = drafted.host
        step = self._copy_back(plan, rows, logprob_rows, output, scores, launched, counts)
        if structured:
            self.masks.sampled(step, structured)
        failures = self.sampler.processors.failures(rows_host) | self.masks.failures(structured)
        step.failed = {rows[index]: reason for index, reason in failures.items()}
        return step

    def _choose(
        self,
        logits: torch.Tensor,
        rows: list[int],
        rows_host: list[int],
        slots: torch.Tensor,
        lengths: torch.Tensor,
        mask: TokenMask | None,
    ) -> tuple[dict[str, torch.Tensor], dict[int, int]]:
        """Sample, keep the tokens for the next step → tensors for the host; row → logprobs."""
        if mask is not None and self.sampler.is_plain_in_torch(rows_host):
            # In place: this needs less memory than the other stages of the sampler in torch.
            self.sampler.mask(logits, mask)
            mask = None
        chosen, logprobs = self.sampler.sample_eagerly(logits, slots, rows_host, lengths, mask)
        logprob_rows = self._logprob_rows(rows, rows_host)
        return {"chosen": chosen, **_tensors(logprobs if logprob_rows else None)}, logprob_rows

    def _logprob_rows(self, rows: list[int], rows_host: list[int]) -> dict[int, int]:
        """Row of the plan → k, for rows with log-probabilities."""
        num_logprobs = self.sampling.num_logprobs
        if not num_logprobs:
            return {}
        places = dict(zip(rows_host, rows, strict=True))
        return {places[slot]: k for slot, k in num_logprobs.items() if slot in places}

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """→ hidden states [num_tokens, hidden_size]"""
        places = None if self.query_ring is None else self.query_ring.places(inputs)
        context = ForwardContext.of(
            self.backend, inputs.layouts, inputs.positions, precompiling=self.precompiling,
            query_places=places,
            source=None if self.sources is None else self.sources.context(inputs),
            incoming=None if self.stage is None else self.stage.states_in(inputs.input_ids),
        )  # fmt: skip
        hidden: torch.Tensor = self.model(inputs.input_ids, context)
        return hidden

    def logits(self, hidden: torch.Tensor, ending: Ending = Ending.LOGITS) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size], or the part of it that this rank
        samples plain rows from; of a stage that does not sample, the states themselves."""
        if ending is Ending.STATES:
            return hidden
        if ending is Ending.PLAIN and self.sampler.shard is not None:
            return self.sampler.shard.logits(self.model.compute_logits, hidden)  # type: ignore
        logits: torch.Tensor = self.model.compute_logits(hidden)  # type: ignore[operator]
        return logits[:, : self.vocab_size]

    def update_slots(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Update what is remembered of the slots that the plan releases and starts."""
        for slot in plan.released if self._uncompacted else ():
            self._uncompacted.pop(slot, None)
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
        sample_rows: list[int],
        logprob_rows: dict[int, int],
        output: dict[str, torch.Tensor],
        scores: list[PromptScores],
        launched: float,
        drafted: DraftCounts | None = None,
    ) -> LaunchedStep:
        """Propose drafts, and start the copies to the host; no synchronisation."""
        proposal_rows: list[int] = []
        if self.drafting is not None:
            proposal_rows = self.drafting.proposal_rows(plan)
            if proposal_rows:
                proposed = self.drafting.propose([plan.slots[row] for row in proposal_rows])
                if proposed is None:
                    proposal_rows = []
                else:
                    output["proposed"] = proposed
        if self.stage is not None and sample_rows:
            self.stage.send_tokens(output["chosen"], sample_rows)
        keep: list[Any] = [output, scores]
        event = None
        # The next step overwrites these buffers.
        copies = to_host(output)
        if self.device.type == "cuda":
            scores = [replace(each, tables=to_host(each.tables)) for each in scores]
            event = torch.cuda.Event()
            event.record()
        return LaunchedStep(
            plan, sample_rows, logprob_rows, copies, scores, event, launched, keep,
            drafted=drafted, proposal_rows=proposal_rows,
        )  # fmt: skip


def _tensors(logprobs: Logprobs | None) -> dict[str, torch.Tensor]:
    return {} if logprobs is None else {name: getattr(logprobs, name) for name in LOGPROB_FIELDS}
