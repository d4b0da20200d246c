"""The model runner: launches one step per plan. Runs on the launch thread alone."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ..nn.context import ForwardContext
from ..nn.operations import SampleOutputs
from ..protocols.attention import AttentionBackend
from ..step import NOTHING_IN_PROCESS, InProcess, StepPlan, StepResult, TokenLogprobs
from .batch import PersistentBatch, StepInputs, StepRows, releasing_all
from .graphs import DecodeGraphs, Ending
from .mixed_graphs import MixedGraphs
from .sampling.masks import GrammarMasks, TokenMask
from .sampling.sampler import SCORED_ROWS, Logprobs, Sampler
from .sampling.sampling_state import SamplingState

logger = logging.getLogger("jackfield.worker")


@dataclass
class LaunchedStep:
    """A step in flight on the device; `wait` turns it into a StepResult."""

    plan: StepPlan
    sample_rows: list[int]
    wanted_logprobs: dict[int, int]
    """Row of the plan → k."""
    output: dict[str, torch.Tensor]
    prompt_scores: list[dict[str, Any]]
    event: Any
    launched: float
    keep: list[Any] = field(default_factory=list)
    """Device tensors that the copies read; held until they are done."""
    failed: dict[int, str] = field(default_factory=dict)
    """Row of the plan → why it failed before it was sampled."""

    def chosen_tokens(self) -> list[int]:
        """Block until the tokens are on the host: [num sampling rows], -1 where none could be
        sampled."""
        if self.event is not None:
            self.event.synchronize()
        return self._sampled()

    def _sampled(self) -> list[int]:
        tokens: list[int] = self.output["chosen"].tolist()
        if len(tokens) != len(self.sample_rows):
            # A recorded step samples for all of its rows.
            tokens = [tokens[row] for row in self.sample_rows]
        return tokens

    late_preparations: int = 0
    launch_wait_seconds: float = 0.0

    def wait(self) -> StepResult:
        """Block until the copies to the host are done."""
        if self.event is not None:
            self.event.synchronize()
        self.keep.clear()
        failed = dict(self.failed)
        chosen = self._sampled() if self.sample_rows else []
        for row, token in zip(self.sample_rows, chosen, strict=True):
            if token < 0 and row not in failed:
                failed[row] = "no token can be chosen: NaN logits, or every token is masked"
        counts, token_ids = [0] * len(self.plan.slots), chosen
        for row in self.sample_rows:
            counts[row] = 1
        if failed:
            for row in failed:
                counts[row] = 0
            sampled = zip(self.sample_rows, chosen, strict=True)
            token_ids = [token for row, token in sampled if row not in failed]
        logprobs = {}
        if self.wanted_logprobs:
            tables = {name: self.output[name].tolist() for name in _LOGPROB_FIELDS}
            # A recorded step has results for all of its rows.
            whole = len(tables["rank"]) != len(self.sample_rows)
            for index, row in enumerate(self.sample_rows):
                if (k := self.wanted_logprobs.get(row)) is not None and counts[row]:
                    at = row if whole else index
                    logprobs[row] = [_position(tables, at, chosen[index], k)]
        prompts = {}
        for scores in self.prompt_scores:
            tables = {name: scores[name].tolist() for name in _LOGPROB_FIELDS}
            targets = scores["targets"].tolist()
            prompts[scores["row"]] = [
                _position(tables, index, target, scores["k"])
                for index, target in enumerate(targets)
            ]
        return StepResult(
            step=self.plan.step,
            counts=counts,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompts,
            failed=failed,
            device_seconds=time.monotonic() - self.launched,
            late_preparations=self.late_preparations,
            launch_wait_seconds=self.launch_wait_seconds,
        )


_LOGPROB_FIELDS = ("top_ids", "top_logprobs", "logprob", "rank")


def _position(tables: dict[str, Any], index: int, token_id: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token_id,
        logprob=tables["logprob"][index],
        rank=tables["rank"][index],
        top_ids=tables["top_ids"][index][:k],
        top_logprobs=tables["top_logprobs"][index][:k],
    )


class ModelRunner:
    """Turns plans into launches: batch, forward, sampling, copies back."""

    def __init__(
        self,
        *,
        model: nn.Module,
        backend: AttentionBackend,
        batch: PersistentBatch,
        sampling: SamplingState,
        sampler: Sampler,
        vocab_size: int,
        device: torch.device,
        masks: GrammarMasks,
    ) -> None:
        self.model = model
        self.backend = backend
        self.batch = batch
        self.sampling = sampling
        self.sampler = sampler
        self.vocab_size = vocab_size
        self.device = device
        self.masks = masks
        self._logprobs: dict[int, int] = {}
        """Slot → k, for requests with log-probabilities."""
        self._prompt_logprobs: dict[int, int] = {}
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.precompiling = False
        """Whether kernels are only compiled, not run."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> LaunchedStep:
        """Queue one step on the device and return at once."""
        launched = time.monotonic()
        self.update_slots(plan, in_process)
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
        sample_rows = np.flatnonzero(np.asarray(plan.samples, dtype=bool)).astype(np.int32)
        inputs = self.batch.lay_out(rows, sample_rows, writes)
        self.sampling.upload()
        hidden = self.forward(inputs)
        if not inputs.sample_rows:
            scores = self._score_prompts(plan, rows, hidden)
            return self._copy_back(plan, [], {}, {}, scores, launched)
        logits = self.logits(hidden[inputs.last_tokens])
        scores = self._score_prompts(plan, rows, hidden)
        rows_host = [plan.slots[row] for row in inputs.sample_rows]
        return self._sample(
            plan,
            logits,
            inputs.sample_rows,
            rows_host,
            inputs.sample_slots,
            inputs.sample_lengths,
            scores,
            launched,
        )

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
        try:
            if not graphs.launch(rows, writes):
                return None
        except RuntimeError:
            logger.exception("a step with prompts cannot be recorded; such steps are launched")
            self.mixed_graphs = None
            return None
        # Runs while the device computes.
        self.sampling.upload()
        scores = self._score_prompts(plan, rows, graphs.states)
        sample_rows = [row for row, samples in enumerate(plan.samples) if samples]
        if not sample_rows:
            return self._copy_back(plan, [], {}, {}, scores, launched)
        rows_host = [plan.slots[row] for row in sample_rows]
        ending = self._ending(rows_host)
        # Rows that do not sample are padding there.
        num_rows = sample_rows[-1] + 1
        graphs.finish(num_rows, ending)
        if ending is not Ending.LOGITS:
            made, wanted = self._recorded(graphs.outputs, num_rows, sample_rows, rows_host)
            return self._copy_back(plan, sample_rows, wanted, made, scores, launched)
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
        self.sampling.upload()
        try:
            if not graphs.launch(plan, ending):
                return None
        except RuntimeError:
            logger.exception("a decode graph cannot be recorded; going on without graphs")
            self.graphs = None
            return None
        if ending is not Ending.LOGITS:
            made, wanted = self._recorded(graphs.outputs, len(rows), rows, rows_host)
            return self._copy_back(plan, rows, wanted, made, [], launched)
        slots, lengths = graphs.sampling_inputs(len(rows))
        logits = graphs.logits[: len(rows)]
        return self._sample(plan, logits, rows, rows_host, slots, lengths, [], launched)

    def _ending(self, rows_host: list[int]) -> Ending:
        """Return the recorded ending that serves all that these slots request."""
        if self.masks.rows(rows_host):
            return Ending.LOGITS
        if self.sampler.is_plain(rows_host):
            return Ending.PLAIN
        return Ending.FULL if self.sampler.recordable(rows_host) else Ending.LOGITS

    def _recorded(
        self, outputs: SampleOutputs, num_rows: int, rows: list[int], rows_host: list[int]
    ) -> tuple[dict[str, torch.Tensor], dict[int, int]]:
        """Collect results of a recorded step of `num_rows` rows → tensors for the host; row →
        logprobs."""
        out, wanted = outputs.first(num_rows), self._wanted(rows, rows_host)
        scored = _tensors(Logprobs(*out[1:])) if wanted else {}
        return {"chosen": out.chosen, **scored}, wanted

    def _sample(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        rows: list[int],
        rows_host: list[int],
        slots: torch.Tensor,
        lengths: torch.Tensor,
        scores: list[dict[str, Any]],
        launched: float,
    ) -> LaunchedStep:
        """Sample from the preceding forward pass, and start the copies to the host.

        Rows with a grammar wait here for their last tokens, while the forward pass runs.
        """
        structured = self.masks.rows(rows_host)
        mask = self.masks.fill(structured, len(rows)) if structured else None
        output, wanted = self._choose(logits, rows, rows_host, slots, lengths, mask)
        step = self._copy_back(plan, rows, wanted, output, scores, launched)
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
        wanted = self._wanted(rows, rows_host)
        return {"chosen": chosen, **_tensors(logprobs if wanted else None)}, wanted

    def _wanted(self, rows: list[int], rows_host: list[int]) -> dict[int, int]:
        """Row of the plan → k, for rows with log-probabilities."""
        if not self._logprobs:
            return {}
        return {
            row: self._logprobs[slot]
            for row, slot in zip(rows, rows_host, strict=True)
            if slot in self._logprobs
        }

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """→ hidden states [num_tokens, hidden_size]"""
        context = ForwardContext.of(
            self.backend, inputs.layouts, inputs.positions, precompiling=self.precompiling
        )
        hidden: torch.Tensor = self.model(inputs.input_ids, context)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size]"""
        logits: torch.Tensor = self.model.compute_logits(hidden)  # type: ignore[operator]
        return logits[:, : self.vocab_size]

    def update_slots(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Update the sampling state of the slots that the plan releases and starts."""
        processors = self.sampler.processors
        for slot in plan.released:
            processors.release(slot)
            self.sampling.release(slot)
            self.masks.release(slot)
            self._logprobs.pop(slot, None)
            self._prompt_logprobs.pop(slot, None)
        for start in plan.starts:
            self.sampling.start(start, processed=bool(processors) and processors.start(start))
            self.masks.start(start, in_process.grammars.get(start.slot))
            for table, k in (
                (self._logprobs, start.params.logprobs),
                (self._prompt_logprobs, start.params.prompt_logprobs),
            ):
                if k is not None:
                    table[start.slot] = self.vocab_size if k == -1 else min(k, self.vocab_size)
                else:
                    table.pop(start.slot, None)

    def forget_slots(self) -> None:
        """Reset the state of all slots. Called between steps."""
        self.update_slots(releasing_all(self.batch.num_slots))
        self.masks.forget_steps()

    def _score_prompts(
        self, plan: StepPlan, rows: StepRows, hidden: torch.Tensor
    ) -> list[dict[str, Any]]:
        """Score the prompt tokens that follow this step's positions, if requested."""
        scored: list[dict[str, Any]] = []
        if not self._prompt_logprobs:
            return scored
        starts, ends = rows.query_start, rows.seq_lens
        for row, slot in enumerate(plan.slots):
            if (k := self._prompt_logprobs.get(slot)) is None:
                continue
            first = int(ends[row]) - plan.num_tokens[row]
            count = min(int(ends[row]), int(self.batch.table.num_prompt[slot]) - 1) - first
            if count <= 0:
                continue
            begin = int(starts[row])
            targets = self.batch.table.token_history[slot, first + 1 : first + 1 + count].long()
            parts = [
                self.sampler.prompt_logprobs(
                    self.logits(hidden[begin + at : begin + min(at + SCORED_ROWS, count)]),
                    targets[at : at + SCORED_ROWS],
                    k,
                )
                for at in range(0, count, SCORED_ROWS)
            ]
            result = {
                name: torch.cat([getattr(part, name) for part in parts]) for name in _LOGPROB_FIELDS
            }
            scored.append({**result, "targets": targets, "row": row, "k": k})
        return scored

    def _copy_back(
        self,
        plan: StepPlan,
        sample_rows: list[int],
        wanted: dict[int, int],
        output: dict[str, torch.Tensor],
        scores: list[dict[str, Any]],
        launched: float,
    ) -> LaunchedStep:
        """Start the copies to the host; no synchronisation."""
        keep: list[Any] = [output, scores]
        event = None
        if self.device.type == "cuda":
            output = {name: _to_host(tensor) for name, tensor in output.items()}
            scores = [
                {
                    name: _to_host(value) if isinstance(value, torch.Tensor) else value
                    for name, value in one.items()
                }
                for one in scores
            ]
            event = torch.cuda.Event()
            event.record()
        else:
            # The next step overwrites these buffers.
            output = {name: tensor.clone() for name, tensor in output.items()}
        return LaunchedStep(plan, sample_rows, wanted, output, scores, event, launched, keep)


def _tensors(logprobs: Logprobs | None) -> dict[str, torch.Tensor]:
    return {} if logprobs is None else {name: getattr(logprobs, name) for name in _LOGPROB_FIELDS}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
