"""Verifies drafts, and lets the speculator propose the next ones.

A row with d drafts samples at 1 + d positions, with noise of (seed, position, token), and keeps
tokens up to the first that differs from the draft. So tokens equal those of single steps, and a
draft x is accepted with probability p(x) (rejection sampling: Leviathan, Kalman, Matias 2023). The
host learns the numbers of accepted and new drafts one step late.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...config.speculative_config import FIELD
from ...loading.second_model import ModelBeside
from ...nn.context import Taps
from ...nn.operations import Operations
from ...nn.step_operations.drafts import DraftTables
from ...parallel.ranks import Group, OneRank
from ...parts.speculation import NAME, DraftPlan, DraftResult, DraftStart, StepCost
from ...protocols.attention import PagedBackend
from ...protocols.models import HiddenStates
from ...protocols.speculators import (
    Drafts,
    Speculator,
    SpeculatorSetup,
)
from ...registration.plugin_options import typed_options
from ...step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart, StepPlan
from ..batch import StepInputs
from ..graphs.pass_graphs import RowDrafts
from ..launched_step import LaunchedStep
from ..sampling.masks import GrammarMasks
from ..sampling.processors import Processors
from ..sampling.sampling_state import SamplingState
from ..slot_table import SlotTable
from .draft_model import draft_needs, draft_passes, token_states
from .draft_passes import DraftPasses, TokenStates, own_blocks
from .draft_verifier import DraftVerifier
from .drafted_route import DraftedRoute
from .drafter import Drafter, sent
from .forced_drafts import ForcedDrafts, forced_drafts
from .part import PartNeeds, PartSite, PartStart, Report, Route, StartContext, WorkerPart

if TYPE_CHECKING:
    from ..runner import ModelRunner

logger = logging.getLogger("jackfield.worker")
ONE_GROUP = OneRank()


class SpeculationStart(PartStart):
    option = "speculative_config"

    def __init__(self, start: StartContext) -> None:
        config = start.config.speculative_config
        assert config is not None, "no speculator is configured"
        self._start, self._config = start, config
        self._speculator_class = start.plugins["speculator"].load(config.speculator)
        self._options = typed_options(
            "", self._speculator_class.options, config.options, field=FIELD
        )
        self._needs, self.layers, self._models = draft_needs(
            start, self._speculator_class, self._options
        )
        self._passes: DraftPasses | None = None
        self.needs = PartNeeds(
            refuses=backend_refusal,
            batch={"num_drafts": config.num_drafts},
            model=self._needs.model,
            own_blocks=own_blocks(config.num_drafts, start.config.block_size),
        )

    def make(self, site: PartSite) -> Speculation:
        config, ranks = self._config, self._start.ranks
        who, speculator = config.speculator, None
        states = token_states(self._start, site, self._needs)
        self._passes = draft_passes(self._start, site, self._needs, self.layers, states)
        if ranks.pipeline.last and (ranks.tensor.rank == 0 or self._passes is not None):
            who, speculator = self._speculator(site)
        return Speculation(
            speculator,
            who,
            table=site.batch.table,
            sampling=site.sampling,
            operations=self._start.operations,
            num_drafts=config.num_drafts,
            group=ranks.tensor,
            passes=self._passes,
            states=states,
            widths=config.widths,
            models=self._models,
        )

    def _speculator(self, site: PartSite) -> tuple[str, Speculator]:
        """Return the speculator, and what it is called in messages."""
        config, table, registry = self._config, site.batch.table, self._start.plugins["speculator"]
        setup = SpeculatorSetup(
            num_drafts=config.num_drafts,
            options=self._options,
            vocab_size=site.sampling.vocab_size,
            max_model_len=site.batch.max_model_len,
            num_slots=table.num_slots,
            device=table.storage.device,
            hidden_size=self._start.model_config.hidden_size,
            model=self._needs.model,
        )
        with registry.calling(config.speculator, "its constructor"):
            speculator: Speculator = self._speculator_class(setup)
        return registry.described(config.speculator), speculator

    def bind(self, caches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        if self._passes is not None:
            self._passes.bind()


def backend_refusal(backend: type[PagedBackend]) -> str | None:
    """Return why an attention backend does not fit the part, or None."""
    if not getattr(backend, "bounded_lengths", False):
        return "it needs lengths that only the device knows (speculative_config)"
    return None


class Speculation(WorkerPart):
    """An engine's speculator, and its drafts' fate. Launch thread only."""

    name = NAME

    def __init__(
        self,
        speculator: Speculator | None,
        who: str,
        *,
        table: SlotTable,
        sampling: SamplingState,
        operations: Operations,
        num_drafts: int,
        group: Group = ONE_GROUP,
        passes: DraftPasses | None = None,
        states: TokenStates | None = None,
        widths: Sequence[int] = (),
        models: Sequence[ModelBeside] = (),
    ) -> None:
        """`speculator`: on the first rank of `group`, whose drafts all ranks get, and on the others
        if it has passes; `who`: for messages; `num_drafts`: most per row; `passes`: of a speculator
        that needs more than tokens; `states`: what it reads of this stage's; `widths`: numbers of
        drafts that all rows of a step may have, which are recorded; without any: the most;
        `models`: of the speculator.
        """
        self._states, self.models = states, models
        self.widths = widths or (num_drafts,)
        self._group = group
        self._table = table
        self._sampling = sampling
        self._num_drafts = num_drafts
        self._device = table.storage.device
        self._masks: GrammarMasks | None = None
        self._processors: Processors | None = None
        self._proposal_rows: list[int] = []
        """Rows of the current plan with new drafts."""
        self._operations = operations
        num_proposed = torch.zeros(table.num_slots + 1, dtype=torch.int32, device=self._device)
        self._tables = DraftTables(table.token_history, table.lengths, num_proposed)
        self._rests = False
        """Whether plans ask for no proposals (`DraftPlan.rests`)."""
        self._distributions = None if passes is None else passes.distributions
        self.drafter = Drafter(
            speculator, who, table, num_drafts, passes, alone=group.size == 1
        )  # fmt: skip
        self.verifier = DraftVerifier(
            table, self._tables, sampling, operations, num_drafts, self._distributions
        )
        self.costs: list[StepCost] = []
        """Measured, and not reported yet."""

    # ------------------------------------------------------------ requests

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        part = start.parts.get(NAME)
        if isinstance(part, DraftStart):
            self.drafter.start(start, part)

    def release(self, slot: int) -> None:
        self.drafter.release(slot)

    # ------------------------------------------------------------ steps

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        """Take rejected drafts out of the lengths' bounds."""
        if not isinstance(part, DraftPlan):
            return
        self._table.shorten(part.rejections)
        if part.rests:  # Tokens will come in the places of the last drafts.
            self._tables.num_proposed.zero_()
            if self._distributions is not None:
                self._distributions.forget()

    def receive(self, part: PartPlan) -> None:
        if isinstance(part, DraftPlan) and part.rests is not None:
            self._rests = part.rests

    def context(self, inputs: StepInputs) -> Taps | None:
        return None if self._states is None else self._states.layers

    def computed(self, inputs: StepInputs, hidden: HiddenStates) -> None:
        if self._states is not None:
            self._states.keep(inputs, hidden)

    def sampled(self, plan: StepPlan, output: dict[str, torch.Tensor], rows: Sequence[int]) -> None:
        which = self._proposal_rows = self.proposal_rows(plan) if rows else []
        slots = [plan.slots[row] for row in which]
        drafts = self.drafter.next_drafts(plan, which, rests=self._rests)
        if not which:
            return
        forced = forced_drafts(
            {} if self._masks is None else self._masks.take_forced(),
            plan, which, self._num_drafts, output.get("verdicts"), self._device,
        )  # fmt: skip
        proposed = self._keep(slots, drafts, forced)
        if proposed is None:
            self._proposal_rows = []
            return
        output["proposed"] = proposed
        if any(map(self._sampling.has_grammar, slots)):
            output["drafts"] = self._new_drafts(slots)

    def after(self, part: PartPlan | None, step: LaunchedStep) -> Report:
        step.proposal_rows, self._proposal_rows = self._proposal_rows, []
        slots = [step.plan.slots[row] for row in step.proposal_rows]
        useless = self._masks.unfollowed(slots) if self._masks is not None else ()
        costs, self.costs = tuple(self.costs), []
        return lambda: DraftResult(_numbers(step, useless), step.verified, costs)

    def routes(self, runner: ModelRunner) -> list[Route]:
        self._masks, self._processors = runner.masks, runner.sampler.processors
        self._masks.seeks_forced = True
        runner.sampler.rejects = self.verifier.rejects
        if runner.stage is not None and self._states is not None:
            runner.stage.beside = self._states.taps
        return [DraftedRoute(runner, self.verifier)]

    # ------------------------------------------------------------ proposals

    def proposal_rows(self, plan: StepPlan) -> list[int]:
        """Return the plan's rows that get drafts: sampling ones, unless a logits processor bars
        them."""
        if self._rests or (not self.drafter.works and self._group.size == 1):
            return []
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        if not (processors := self._processors):
            return rows
        return [row for row in rows if not processors.bars_drafts(plan.slots[row])]

    def _keep(
        self, slots: Sequence[int], found: RowDrafts | None, forced: ForcedDrafts | None
    ) -> torch.Tensor | None:
        """Put drafts after these slots' tokens → [len(slots)] int32 numbers; None: the speculator
        has failed."""
        if self._group.size == 1 and found is None:
            return None
        device_slots = sent(slots, self._device) if found is None else found.slots
        drafts, used = None if found is None else found.drafts, None
        if forced is not None and drafts is not None:
            newest = self._table.token_history[device_slots, self._table.lengths[device_slots]]
            used = forced.used(newest)
            drafts = forced.before(drafts, used)
        if self._group.size > 1:
            drafts = self._shared(drafts, len(slots))
        assert drafts is not None, "there are some, or those of another rank"
        numbers = self._operations.keep_drafts(
            drafts.token_ids, drafts.counts, device_slots, self._tables, self._sampling.vocab_size
        )
        if self._distributions is not None:
            # Of what a grammar forces, no distribution is known.
            drawn = numbers if used is None else numbers.masked_fill(used, 0)
            self._distributions.keep(drafts.token_ids, drawn, device_slots)
        return numbers

    def _shared(self, drafts: Drafts | None, num_rows: int) -> Drafts:
        """Return the first rank's drafts on each: other ranks may not have its order of events, and
        may not fail with it. None: this rank has none.
        """
        both = torch.zeros((num_rows, self._num_drafts + 1), dtype=torch.int32, device=self._device)
        if drafts is not None and self._group.rank == 0:
            vocab_size = self._sampling.vocab_size
            both[:, 0], both[:, 1:] = drafts.counts, drafts.token_ids.clamp(-1, vocab_size)
        both = self._group.all_reduce(both)
        return Drafts(both[:, 1:], both[:, 0].contiguous())

    def _new_drafts(self, slots: Sequence[int]) -> torch.Tensor:
        """→ [len(slots), num_drafts] int32"""
        device_slots = sent(slots, self._device)[:, None]
        places = self._tables.lengths[device_slots] + 1
        order = torch.arange(self._num_drafts, device=self._device)
        return self._tables.history[device_slots, places + order]

    def warm_up(self) -> None:
        """Propose and verify in the scratch slot, compiling kernels."""
        scratch = self._table.scratch_slot
        self._keep([scratch], self.drafter.scratch_drafts(), None)
        chosen = torch.zeros(1, dtype=torch.int32, device=self._device)
        starts = torch.arange(2, dtype=torch.int32, device=self._device)
        slots = torch.full((1,), scratch, dtype=torch.int64, device=self._device)
        self.verifier.verified(chosen, chosen, starts, slots)


def _numbers(step: LaunchedStep, useless: Collection[int]) -> list[int]:
    """Return each row's new drafts, -1 where it may have none; [] if no row may.

    useless: slots whose drafts cannot be verified
    """
    rows, slots = step.proposal_rows, step.plan.slots
    if not rows:
        return []
    proposed = [-1] * len(slots)
    for row, number in zip(rows, step.output["proposed"].tolist(), strict=True):
        if slots[row] not in useless:
            proposed[row] = number
    return proposed
