"""Collects a step's rows into a `StepPlan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from ..request import Request
from ..step import PartPlan, SlotStart, StepPlan, TableWrite
from .queues.decode_rows import DecodeColumns

NamedCalls: TypeAlias = tuple[tuple[str, Callable[..., Any]], ...]
"""(part's name, method) of each overriding part."""


@dataclass(slots=True)
class PlannedStep:
    rows: list[Request]
    epochs: list[int]
    """[num_rows] Each request's epoch; a later one means that it ended or was preempted."""
    first_positions: dict[int, int]
    """Row → first position, with prompt logprobs."""


@dataclass(slots=True)
class PlanBuilder:
    """Rows of the plan being made, by kind."""

    budget: int
    prompts_alone: bool
    longest_whole: int
    """See `StepSize`."""
    decodes: list[Request] = field(default_factory=list)
    drafted: list[Request] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    columns: DecodeColumns | None = None
    """Columns of `decodes`, if added together."""
    prefills: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """[len(prefills)] Tokens per prefill row"""
    starts: list[SlotStart] = field(default_factory=list)
    table_writes: list[TableWrite] = field(default_factory=list)

    @property
    def rows(self) -> Iterable[Request]:
        """All rows' requests, in plan order."""
        return chain(self.decodes, self.drafted, self.prefills)

    @property
    def has_rows(self) -> bool:
        return bool(self.decodes or self.drafted or self.prefills)

    def add_decodes(self, columns: DecodeColumns) -> None:
        """Add all decode rows, counted against the budget."""
        self.columns = columns
        self.decodes = columns.rows
        self.budget -= len(columns.rows)

    def add_prefill(self, request: Request, chunk: int) -> None:
        """Add a row of `chunk` tokens, counted by the caller."""
        self.prefills.append(request)
        self.chunks.append(chunk)

    def start(self, request: Request, start_part: NamedCalls) -> None:
        """Announce a request's slot to the worker. start_part: of parts."""
        parts = {name: part for name, call in start_part if (part := call(request)) is not None}
        self.starts.append(_slot_start(request, parts))

    def planned(self) -> PlannedStep:
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
        """Return the plan. released: slots left since the last plan. parts: parts' data."""
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
