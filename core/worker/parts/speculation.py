"""Verifies drafts, and lets the speculator propose the next ones.

A row with d drafts samples at 1 + d positions, with noise of (seed, position, token), and keeps
tokens up to the first that differs from the draft. So tokens equal those of single steps, and a
draft x is accepted with probability p(x) (rejection sampling: Leviathan, Kalman, Matias 2023). The
host learns the numbers of accepted and new drafts one step late.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
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
    PROMPT_END,
    Drafts,
    KnownTokens,
    RequestText,
    Speculator,
    SpeculatorSetup,
)
from ...registration.plugin_options import typed_options
from ...step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart, StepPlan
from ..batch import LogitRows, StepInputs, StepRows
from ..graphs.pass_graphs import PassGraphs, RowDrafts
from ..graphs.recorder import Recorder
from ..launched_step import DraftCounts, LaunchedStep
from ..packing import PackedUpload
from ..sampling.masks import GrammarMasks
from ..sampling.processors import Processors
from ..sampling.rejection import DrawnDrafts
from ..sampling.rounds import DraftPlaces
from ..sampling.sampling_state import SamplingState
from ..slot_table import SlotTable
from .draft_model import draft_needs, draft_passes, token_states
from .draft_passes import DraftPasses, PassRows, TokenStates, own_blocks
from .drafted_route import DraftedRoute
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


@dataclass(frozen=True)
class DraftedRows:
    """Positions at which a step with drafts samples. L = positions, S = sampling rows."""

    host: DraftCounts
    slots_host: Sequence[int]
    """[num_rows] Slots of the plan."""
    logit_rows: list[int]
    """[L] Rows of the plan."""
    logit_tokens: torch.Tensor
    """[L] int64: index into the step's tokens."""
    slots: torch.Tensor
    """[L] int64"""
    lengths: torch.Tensor
    """[L] int64: tokens before the one that is sampled."""
    drafts: torch.Tensor
    """[L] int32: draft at the sampled token's place; undefined at a row's last position."""
    starts: torch.Tensor
    """[S + 1] int32: each row's first position, and the total."""
    row_slots: torch.Tensor
    """[S] int64"""
    drawn: DrawnDrafts | None
    """The same drafts, if they are accepted by what they were drawn from."""


class ForcedDrafts(NamedTuple):
    """What grammars force after the newest tokens of R rows."""

    token_ids: torch.Tensor
    """[R, K] int64"""
    counts: torch.Tensor
    """[R] int64; 0: nothing"""
    newest: torch.Tensor
    """[R] int64: they follow this token."""

    def used(self, newest: torch.Tensor) -> torch.Tensor:
        """Return which rows have any: [R] bool. newest: [R] int32, the rows' tokens"""
        return (self.counts > 0) & (self.newest == newest)

    def before(self, drafts: Drafts, used: torch.Tensor) -> Drafts:
        """Return these instead of a speculator's, in rows that have any."""
        token_ids = torch.where(used[:, None], self.token_ids, drafts.token_ids.long())
        return drafts._replace(
            token_ids=token_ids, counts=torch.where(used, self.counts, drafts.counts.long())
        )


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
        self._passes, self._states, self.models = passes, states, models
        self.widths = widths or (num_drafts,)
        self._speculator = speculator
        self._group = group
        self._who = who
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
        self._started: set[int] = set()
        """Slots whose end the speculator wants to know."""
        self.graphs: PassGraphs | None = None
        """Recorded passes, once there are any."""
        self.costs: list[StepCost] = []
        """Measured, and not reported yet."""

    # ------------------------------------------------------------ requests

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        part = start.parts.get(NAME)
        if self._speculator is None or not isinstance(part, DraftStart):
            return
        end = start.num_prompt_tokens
        text = RequestText(
            slot=start.slot,
            num_tokens=len(start.token_ids),
            num_prompt_tokens=end,
            sharing=part.sharing,
            prompt_end=start.token_ids[max(0, end - PROMPT_END) : end],
            prediction=part.prediction,
        )
        with self._guarded():
            self._speculator.start(text)
            if type(self._speculator).release is not Speculator.release:
                self._started.add(start.slot)

    def release(self, slot: int) -> None:
        if slot not in self._started:
            return
        self._started.discard(slot)
        if self._speculator is not None:
            with self._guarded():
                bound = int(self._table.length_bounds[slot]) + 1
                self._speculator.release(self._known_tokens([slot]), slot, bound)

    # ------------------------------------------------------------ steps

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        """Take rejected drafts out of the lengths' bounds."""
        if not isinstance(part, DraftPlan):
            return
        self._table.shorten(part.rejections)
        if part.rests:  # Tokens will come in the places of the last drafts.
            self._tables.num_proposed.zero_()
            if self._passes is not None and self._passes.distributions is not None:
                self._passes.distributions.forget()

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
        found = self._next_drafts(plan, which)
        if not which:
            return
        proposed = self._keep(slots, found, self._forced(plan, output.get("verdicts")))
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
        runner.sampler.rejects = self.rejects
        if runner.stage is not None and self._states is not None:
            runner.stage.beside = self._states.taps
        return [DraftedRoute(runner, self)]

    # ------------------------------------------------------------ verification

    def rows(self, plan: StepPlan, rows: StepRows) -> DraftedRows:
        """Return where a step samples; call between the forward pass and sampling, which overwrites
        the drafts.
        """
        num_drafts = plan.parts[NAME].num_drafts
        logits = LogitRows.verifying(rows, plan.samples, num_drafts)
        sampling, firsts = np.unique(logits.rows, return_index=True)
        counts = np.asarray(num_drafts, dtype=np.int32)[sampling]
        back = firsts.repeat(counts + 1) + counts.repeat(counts + 1) - np.arange(len(logits.rows))
        starts = np.append(firsts, len(logits.rows)).astype(np.int32)
        upload = PackedUpload(self._device)
        for array in (
            logits.tokens.astype(np.int64), rows.slots[logits.rows].astype(np.int64), back,
            starts, rows.slots[sampling].astype(np.int64), self._places(back, counts),
        ):  # fmt: skip
            upload.add(array)
        tokens, slots, from_end, device_starts, row_slots, places = upload.send()
        lengths = self._table.lengths[slots] - from_end
        drafts = self._table.token_history[slots, lengths]
        return DraftedRows(
            host=DraftCounts(sampling.tolist(), counts.tolist()),
            slots_host=plan.slots,
            logit_rows=logits.rows.tolist(),
            logit_tokens=tokens,
            slots=slots,
            lengths=lengths,
            drafts=drafts,
            starts=device_starts,
            row_slots=row_slots,
            drawn=self.drawn(drafts, slots, places) if self.rejects else None,
        )

    def _places(self, back: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return each position's place among its row's drafts, the most of a row at its last.

        back: [L] drafts after each position; counts: [S] → [L] int64
        """
        order = counts.repeat(counts + 1) - back
        return np.where(back > 0, order, self._num_drafts).astype(np.int64)

    @property
    def rejects(self) -> bool:
        """Whether drafts are accepted by what they were drawn from, not while they are sampled."""
        return self._passes is not None and self._passes.distributions is not None

    def drawn(self, drafts: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> DrawnDrafts:
        """Return the drafts of L positions if `rejects`; recordable. places: as
        `DraftDistributions.of`."""
        assert self._passes is not None and self._passes.distributions is not None, "it rejects"
        return self._passes.distributions.of(drafts, slots, places)

    def limit(self, drafted: DraftedRows, limits: torch.Tensor) -> None:
        """Let so many drafts of each row be accepted at most. limits: [S] int32"""
        proposed, slots = self._tables.num_proposed, drafted.row_slots
        proposed[slots] = torch.minimum(proposed[slots], limits)

    def places(self, drafted: DraftedRows) -> DraftPlaces | None:
        """Return what sampling in rounds needs; None: no row's tokens depend on its output."""
        slots = [drafted.slots_host[row] for row in drafted.host.rows]
        in_turn = [self._sampling.depends_on_output(slot) for slot in slots]
        if not any(in_turn):
            return None
        proposed = self._tables.num_proposed[drafted.row_slots]
        return DraftPlaces(drafted.host.counts, drafted.drafts, proposed, in_turn, drafted.drawn)

    def verify(self, drafted: DraftedRows, chosen: torch.Tensor) -> torch.Tensor:
        """Accept sampled drafts, and take the others out of lengths.

        chosen: [L] int32 → [S, 2] int32: accepted and proposed drafts
        """
        return self.verified(chosen, drafted.drafts, drafted.starts, drafted.row_slots)

    def verified(
        self,
        chosen: torch.Tensor,
        drafts: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """As `verify`, from parts of `DraftedRows`; recordable."""
        return self._operations.verify_drafts(
            chosen, drafts, starts, slots, self._tables, self._num_drafts
        )

    # ------------------------------------------------------------ proposals

    def proposal_rows(self, plan: StepPlan) -> list[int]:
        """Return the plan's rows that get drafts: sampling ones, unless a logits processor bars
        them."""
        if self._rests or (self._speculator is None and self._group.size == 1):
            return []
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        if not (processors := self._processors):
            return rows
        return [row for row in rows if not processors.bars_drafts(plan.slots[row])]

    def _next_drafts(self, plan: StepPlan, which: Sequence[int]) -> RowDrafts | None:
        """Let the speculator read what the step has computed, and propose. which: rows that get
        drafts; None: there are none."""
        if self._speculator is None or not plan.slots:
            return None
        slots = [plan.slots[row] for row in which]
        if self._passes is None:
            return self._proposed(self._known_tokens(slots)) if slots else None
        graphs, observed = self.graphs, None
        if graphs is not None and self._rests and graphs.launch_alone(plan):
            return None
        if graphs is not None and (found := graphs.launch(plan, which)) is not None:
            return found
        if self._observes:
            with self._guarded():
                observed = self.observe(self._passes.rows(plan))
        if not slots or self._speculator is None:
            return None
        if graphs is not None:
            found = graphs.launch_proposal(plan, which, observed)
            if found is not None:
                return found
        return self._proposed(self._passes.known(self._passes.proposal_rows(plan, which), observed))

    @property
    def _observes(self) -> bool:
        speculator = self._speculator
        return speculator is not None and type(speculator).observe is not Speculator.observe

    def observe(self, rows: PassRows) -> torch.Tensor | None:
        """Return the speculator's states of a step's tokens; recordable."""
        assert self._passes is not None and self._speculator is not None, "it has passes"
        states = self._speculator.observe(self._passes.whole(rows))
        if states is not None and (states.dim() != 2 or len(states) != len(rows.row_of)):
            raise ValueError(
                f"observe gave states of {tuple(states.shape)} for {len(rows.row_of)} tokens"
            )
        return states

    def pass_graphs(self, record: Recorder) -> PassGraphs | None:
        """Return graphs of the speculator's passes; None: they cannot be recorded. Nothing is
        recorded yet."""
        passes, speculator = self._passes, self._speculator
        if passes is None or speculator is None or not speculator.recordable or not passes.widest:
            return None
        widths = (1 + num_drafts for num_drafts in (0, *self.widths))

        def observe(slots: torch.Tensor, width: int) -> torch.Tensor | None:
            return self.observe(passes.alike(slots, width))

        return PassGraphs(
            observe=observe if self._observes else None,
            known=passes.recorded,
            propose=self.propose,
            batch=passes.batch,
            record=record,
            widths=[width for width in widths if width <= passes.widest],
            num_drafts=self._num_drafts,
        )

    def _forced(self, plan: StepPlan, verdicts: torch.Tensor | None) -> ForcedDrafts | None:
        """Return drafts of the proposal rows that their grammars force; None: there are none.

        verdicts: [S, 2] of the step's sampling rows
        """
        found = {} if self._masks is None else self._masks.take_forced()
        if not found:
            return None
        sampling = {row: place for place, row in enumerate(np.flatnonzero(plan.samples).tolist())}
        places = np.array([sampling[row] for row in self._proposal_rows], dtype=np.int64)
        numbers = np.zeros((len(places), 3 + self._num_drafts), dtype=np.int64)
        for number, place in enumerate(places.tolist()):
            if (forced := found.get(place)) is not None:
                drafts = forced.tokens[1 : 1 + self._num_drafts]
                numbers[number, :3] = len(drafts), forced.accepted, forced.tokens[0]
                numbers[number, 3 : 3 + len(drafts)] = drafts
        upload = PackedUpload(self._device)
        upload.add(numbers)
        upload.add(places)
        sent, device_places = upload.send()
        accepted = torch.zeros_like(sent[:, 1])
        if verdicts is not None:
            accepted = verdicts[device_places, 0].long()
        return ForcedDrafts(sent[:, 3:], sent[:, 0] * (accepted == sent[:, 1]), sent[:, 2])

    def launch_passes(self, error: Exception) -> None:
        """Go on with launched passes: they cannot be recorded."""
        if self.graphs is not None:
            self.graphs.stop()
        logger.warning(
            "the passes of %s are launched kernel by kernel, as they cannot be recorded: %s",
            self._who, error,
        )  # fmt: skip

    def _keep(
        self, slots: Sequence[int], found: RowDrafts | None, forced: ForcedDrafts | None
    ) -> torch.Tensor | None:
        """Put drafts after these slots' tokens → [len(slots)] int32 numbers; None: the speculator
        has failed."""
        if self._group.size == 1 and found is None:
            return None
        device_slots = self._sent(slots) if found is None else found.slots
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
        if self._passes is not None and self._passes.distributions is not None:
            # Of what a grammar forces, no distribution is known.
            drawn = numbers if used is None else numbers.masked_fill(used, 0)
            self._passes.distributions.keep(drafts.token_ids, drawn, device_slots)
        return numbers

    def _sent(self, slots: Sequence[int]) -> torch.Tensor:
        upload = PackedUpload(self._device)
        upload.add(np.asarray(slots, dtype=np.int64))
        return upload.send()[0]

    def _known_tokens(self, slots: Sequence[int]) -> KnownTokens:
        device_slots = self._sent(slots)
        # The newest token is behind the computed ones.
        lengths = self._table.lengths[device_slots].long() + 1
        return KnownTokens(self._table.token_history, device_slots, lengths)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Go on without drafts if the speculator raises."""
        try:
            yield
        except Exception:
            if self._passes is not None and self._group.size > 1:
                raise  # Other ranks may wait for this one.
            logger.exception("%s failed: the engine goes on without drafts", self._who)
            self._speculator = None

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
        device_slots = self._sent(slots)[:, None]
        places = self._tables.lengths[device_slots] + 1
        order = torch.arange(self._num_drafts, device=self._device)
        return self._tables.history[device_slots, places + order]

    def _proposed(self, tokens: KnownTokens) -> RowDrafts | None:
        with self._guarded():
            return RowDrafts(tokens.slots, self.propose(tokens))
        return None

    def propose(self, tokens: KnownTokens) -> Drafts:
        """Return the speculator's drafts; recordable, if it has passes."""
        assert self._speculator is not None, "asked of a speculator that has failed"
        drafts = self._speculator.propose(tokens)
        shapes = tuple(drafts.token_ids.shape), tuple(drafts.counts.shape)
        num_rows = len(tokens.slots)
        if shapes != ((num_rows, self._num_drafts), (num_rows,)):
            raise ValueError(
                f"propose gave token_ids and counts of {shapes[0]} and {shapes[1]}, for "
                f"{num_rows} rows of {self._num_drafts} drafts"
            )
        return drafts if self._passes is None else self._passes.within(drafts, tokens.lengths)

    def warm_up(self) -> None:
        """Propose for the scratch slot, whose blocks are the null block, and verify, compiling
        kernels."""
        scratch = self._table.scratch_slot
        slots = torch.full((1,), scratch, dtype=torch.int32, device=self._device)
        found = None
        if self._speculator is not None:
            tokens = self._known_tokens([scratch])
            if self._passes is not None:
                observed = self.observe(self._passes.alike(slots, 1)) if self._observes else None
                tokens = self._passes.recorded(slots, torch.zeros_like(slots), observed)
            found = self._proposed(tokens)
        self._keep([scratch], found, None)
        chosen = torch.zeros(1, dtype=torch.int32, device=self._device)
        starts = torch.arange(2, dtype=torch.int32, device=self._device)
        self._operations.verify_drafts(
            chosen, chosen, starts, slots.long(), self._tables, self._num_drafts
        )


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
