"""Collects the rows of the step that is being planned, and makes its `StepPlan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from ..request import Request
from ..step import PartPlan, SlotStart, StepPlan, TableWrite
from .queues.decode_rows import DecodeColumns

NamedCalls: TypeAlias = tuple[tuple[str, Callable[..., Any]], ...]
"""A method of each part that has it, with the part's name."""


@dataclass(slots=True)
class PlannedStep:
    """A planned step, kept until its result arrives."""

    rows: list[Request]
    epochs: list[int]
    """[num_rows] Epoch of each request; a later one means that it ended or was preempted."""
    first_positions: dict[int, int]
    """Row → first position computed, for requests with prompt logprobs."""


@dataclass(slots=True)
class PlanBuilder:
    """Rows of the plan that `Scheduler.schedule` is making, by kind."""

    budget: int
    """Tokens that the step may still get."""
    prompts_alone: bool = False
    longest_whole: int = 0
    """These two: see `StepSize`."""
    decodes: list[Request] = field(default_factory=list)
    drafted: list[Request] = field(default_factory=list)
    """Decode rows with drafts."""
    drafts: list[int] = field(default_factory=list)
    """[len(drafted)]"""
    columns: DecodeColumns | None = None
    """Of `decodes`, if they were added at once."""
    prefills: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """[len(prefills)] tokens of each prefill row"""
    starts: list[SlotStart] = field(default_factory=list)
    table_writes: list[TableWrite] = field(default_factory=list)

    @property
    def rows(self) -> Iterable[Request]:
        """The requests of all rows, in the order of the plan."""
        return chain(self.decodes, self.drafted, self.prefills)

    @property
    def has_rows(self) -> bool:
        return bool(self.decodes or self.drafted or self.prefills)

    def add_decodes(self, columns: DecodeColumns) -> None:
        """Add all decode rows of the plan, and count them against the budget."""
        self.columns = columns
        self.decodes = columns.rows
        self.budget -= len(columns.rows)

    def add_prefill(self, request: Request, chunk: int) -> None:
        """Add a row of `chunk` tokens. The caller counts them against the budget."""
        self.prefills.append(request)
        self.chunks.append(chunk)

    def start(self, request: Request, start_part: NamedCalls) -> None:
        """Tell the worker of a request that takes its slot with this step. start_part: of parts."""
        parts = {name: part for name, call in start_part if (part := call(request)) is not None}
        self.starts.append(_slot_start(request, parts))

    def planned(self) -> PlannedStep:
        """Return what the result will be read by."""
        columns, others = self.columns, self.drafted + self.prefills
        rows = self.decodes
        epochs = [r.epoch for r in rows] if columns is None else columns.epochs
        if others:
            rows = rows + others
            epochs = epochs + [r.epoch for r in others]
        num_decodes = len(self.decodes) + len(self.drafted)
        first_positions = {
            num_decodes + i: request.num_computed_tokens - self.chunks[i]
            for i, request in enumerate(self.prefills)
            if request.params.prompt_logprobs is not None
        }
        return PlannedStep(rows, epochs, first_positions)

    def plan(
        self,
        step: int,
        planned: PlannedStep,
        *,
        released: Iterable[int],
        parts: dict[str, PartPlan],
    ) -> StepPlan:
        """Return the plan of step number `step`. released: slots that requests left since the last
        plan. parts: what parts send with it."""
        num_decodes = len(self.decodes)
        drafts = tuple(self.drafts)
        columns = self.columns
        if columns is not None:
            slots, num_tokens, samples = columns.slots, columns.counts, columns.samples
        else:
            slots = tuple([r.slot for r in self.decodes])
            num_tokens, samples = (1,) * num_decodes, (True,) * num_decodes
        if drafts or self.prefills:
            slots += tuple([r.slot for r in planned.rows[num_decodes:]])
            num_tokens += *(1 + n for n in drafts), *self.chunks
            samples += (True,) * len(drafts)
            samples += tuple([r.num_pending_tokens > 0 for r in self.prefills])
        return StepPlan(
            step=step,
            slots=slots,
            num_tokens=num_tokens,
            samples=samples,
            released=tuple(released),
            starts=tuple(self.starts),
            table_writes=tuple(self.table_writes),
            parts=parts,
        )


def _slot_start(request: Request, parts: dict[str, Any]) -> SlotStart:
    return SlotStart(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=(*request.prompt_token_ids, *request.output_token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        params=request.params,
        seed=request.seed,
        stop_token_ids=tuple(sorted(request.stop_ids)),
        bad_words_token_ids=request.bad_words_token_ids,
        grammar=None if request.grammar is None else request.grammar.start,
        pooling=request.pooling,
        token_type_ids=request.token_type_ids,
        parts=parts,
    )
