"""What a worker does as one stage of a pipeline: states in and out, and sampled tokens back."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...parallel.ranks import Pipeline, Transfer
from ...parts import speculation
from ...step import StepPlan
from ..batch import StepInputs
from ..slot_table import SlotTable
from .part import PartNeeds, PartSite, PartStart, StartContext, WorkerPart


class PipelineStart(PartStart):
    """Computes one stage of a model's."""

    option = "pipeline_parallel_size"

    def __init__(self, start: StartContext) -> None:
        self._start = start
        self.needs = PartNeeds()

    def make(self, site: PartSite) -> PipelineStage:
        """Make room for the states of the largest step."""
        start, dtype = self._start, self._start.model_config.dtype
        return PipelineStage(
            start.ranks.pipeline,
            site.batch.table,
            # Steps that are only compiled have decode rows beside the longest prompt.
            max_tokens=site.batch.max_tokens + start.config.max_num_seqs,
            incoming_size=getattr(start.model, "incoming_size", start.model_config.hidden_size),
            dtype=dtype,
            device=start.device,
        )


class Awaited(NamedTuple):
    """Tokens of an earlier step, which the last stage samples meanwhile."""

    slots: np.ndarray
    """[N] int64: slots whose rows sample there; -1: another request has the slot by now."""
    places: np.ndarray
    """[N] int64: where each token goes in `SlotTable.storage`; the last place: nowhere."""
    counts: np.ndarray
    """[N] int64: drafts of each row."""
    plan: StepPlan
    tokens: torch.Tensor
    """[N] int32; with drafts [N, 2 + most drafts]: how many were accepted, the token, new drafts"""
    transfer: Transfer


class PipelineStage(WorkerPart):
    """The exchange of one stage with the others, step by step as plans say.

    Every stage runs every plan in order, so a tensor needs no header: its size, and whether there
    is one, follow from the plan. Nothing is sent in a step that was not launched as a plan.
    """

    name = "pipeline"

    def __init__(
        self,
        pipeline: Pipeline,
        table: SlotTable,
        *,
        max_tokens: int,
        incoming_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """max_tokens: of a step, padding included; incoming_size: width of the states from the
        stage before."""
        self.pipeline = pipeline
        self._table = table
        self._dtype, self._device = dtype, device
        self.incoming: torch.Tensor | None = None
        """[max_tokens, incoming_size] States from the stage before; None: this is the first."""
        if not pipeline.first:
            size = max_tokens, incoming_size
            self.incoming = torch.zeros(size, dtype=dtype, device=device)
        self.beside: torch.Tensor | None = None
        """[max_tokens, width] What a speculator in the last stage reads of layers, sent after the
        states: each stage fills the columns of its own layers."""
        self._num_arrived = 0
        """Rows of `incoming` that are not zeros."""
        self._num_drafts = table.num_drafts
        self.on_verified: Callable[[StepPlan, torch.Tensor], None] = lambda plan, accepted: None
        """Called in stages before the last with how many drafts were accepted."""
        self._awaited: collections.deque[Awaited] = collections.deque()
        """On the first stage: tokens that are not in the table yet, by step. With drafts on all but
        the last: the lengths of slots depend on them."""

    def receive_inputs(self, plan: StepPlan) -> None:
        """Wait for what a plan's rows need, before any of its writes and other parts' work; on a
        device with streams, the current stream waits."""
        if not plan.slots:
            return
        self._take_tokens(plan)
        if self.incoming is None:
            return
        count = plan.total_tokens
        if count < self._num_arrived:
            # Padding of recorded steps: it may be no number in what came before.
            self.incoming[count : self._num_arrived].zero_()
        self._num_arrived = count
        self.pipeline.receive_hidden(self.incoming[:count]).wait()
        if self.beside is not None:
            self.pipeline.receive_hidden(self.beside[:count]).wait()

    def context(self, inputs: StepInputs) -> torch.Tensor | None:
        """Return what the stage before has sent, [num_tokens, incoming_size]; None: this is the
        first. Of decode rows a copy, which waits for the step's inputs: a layer's kernels may begin
        before those before them end, and attention then reads lengths and tables. In the first
        stage, the embedding waits."""
        if self.incoming is None:
            return None
        states = self.incoming[: len(inputs.input_ids)]
        return states.clone() if inputs.layout.decode_only else states

    def sampled(self, plan: StepPlan, output: dict[str, torch.Tensor], rows: Sequence[int]) -> None:
        """Send what was sampled to the first stage; with drafts, to all before this one."""
        if rows and self._num_drafts:
            self._send_drafts(plan, output.get("verdicts"))
        elif rows:
            self.send_tokens(output["chosen"], rows)

    def send_states(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Send a plan's states to the next stage: [plan.total_tokens or more, its incoming_size].
        The first stage also awaits the tokens that come of them."""
        assert hidden.dtype == self._dtype, f"states are of {hidden.dtype}, not {self._dtype}"
        self.pipeline.send_hidden(hidden[: plan.total_tokens])
        if self.beside is not None:
            self.pipeline.send_hidden(self.beside[: plan.total_tokens])
        if (self.pipeline.first or self._num_drafts) and any(plan.samples):
            slots, counts = self._sampling_rows(plan)
            size = (len(slots), 2 + self._num_drafts) if self._num_drafts else (len(slots),)
            tokens = torch.empty(size, dtype=torch.int32, device=self._device)
            places = self._table.history_places(slots, self._table.length_bounds[slots])
            transfer = self.pipeline.receive_tokens(tokens)
            self._awaited.append(Awaited(slots, places, counts, plan, tokens, transfer))

    @staticmethod
    def _sampling_rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots and drafts of the plan's sampling rows, [N] int64."""
        sampling = np.asarray(plan.samples)
        part = plan.parts.get(speculation.NAME)
        counts = part.num_drafts if isinstance(part, speculation.DraftPlan) else ()
        drafts = np.asarray(counts or [0] * len(plan.slots), dtype=np.int64)
        return np.asarray(plan.slots, dtype=np.int64)[sampling], drafts[sampling]

    def _send_drafts(self, plan: StepPlan, verdicts: torch.Tensor | None) -> None:
        """Send what has become of the step's drafts, its tokens and new drafts to all stages before
        this one. verdicts: [N, 2]
        """
        table = self._table
        slots = self._sent(self._sampling_rows(plan)[0])
        order = torch.arange(1 + self._num_drafts, device=self._device)
        newest = table.token_history[slots[:, None], table.lengths[slots][:, None] + order]
        accepted = torch.zeros_like(newest[:, 0]) if verdicts is None else verdicts[:, 0].int()
        sent = torch.cat((accepted[:, None], newest), dim=1)
        for stage in range(self.pipeline.stage):
            self.pipeline.send_tokens(sent, stage)

    def send_tokens(self, chosen: torch.Tensor, rows: Sequence[int]) -> None:
        """Send what was sampled to the first stage. chosen: [any] tokens, -1 for none; rows: which
        of them are those of the plan's sampling rows, in order."""
        if rows[-1] == len(rows) - 1:
            chosen = chosen[: len(rows)]
        elif len(rows) != len(chosen):
            chosen = chosen.index_select(0, self._sent(np.asarray(rows, dtype=np.int64)))
        # A row without a token ends; until then its next step computes something.
        self.pipeline.send_tokens(chosen.clamp(min=0).to(torch.int32))

    def _take_tokens(self, plan: StepPlan) -> None:
        """Write the tokens that the plan's rows continue from into the table."""
        nowhere = self._table.storage.numel() - 1
        for start in plan.starts:
            # Another request has the slot.
            for awaited in self._awaited:
                own = awaited.slots == start.slot
                awaited.slots[own], awaited.places[own] = -1, nowhere
        # In order, up to the last that has a row of this plan. Those of steps that have ended long
        # ago are there: no row continues from them.
        count = len(self._awaited) - self.pipeline.size - 1
        for number, awaited in enumerate(self._awaited, 1):
            if np.isin(awaited.slots, plan.slots).any():
                count = max(count, number)
        for _ in range(count):
            awaited = self._awaited.popleft()
            awaited.transfer.wait()
            if self._num_drafts:
                self._take_drafts(awaited)
            else:
                self._table.storage.index_copy_(0, self._sent(awaited.places), awaited.tokens)

    def _take_drafts(self, awaited: Awaited) -> None:
        """Take rejected drafts out of the lengths of slots, and write tokens and new drafts."""
        table = self._table
        slots = np.where(awaited.slots < 0, table.scratch_slot, awaited.slots)
        device_slots, counts = self._sent(slots), self._sent(awaited.counts)
        accepted = awaited.tokens[:, 0]
        table.lengths.index_add_(0, device_slots, accepted - counts.int())
        table.lengths[table.scratch_slot].fill_(0)
        if awaited.counts.any():
            self.on_verified(awaited.plan, accepted)
        if self.pipeline.first:
            order = torch.arange(1 + self._num_drafts, device=self._device)
            places = table.lengths[device_slots][:, None] + order
            table.token_history[device_slots[:, None], places] = awaited.tokens[:, 1:]

    def _sent(self, numbers: np.ndarray) -> torch.Tensor:
        """Copy numbers to the device without waiting for it."""
        host = torch.from_numpy(numbers)
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)
