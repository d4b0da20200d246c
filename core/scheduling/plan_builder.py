"""Collects the rows of the step that is being planned, and makes its `StepPlan`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..request import Request
from ..step import (
    Compaction,
    EncodeItem,
    Rejection,
    SlotStart,
    StateCopy,
    StepPlan,
    TableWrite,
)
from .queues.decode_rows import DecodeColumns


@dataclass(slots=True)
class PlannedStep:
    """A planned step, kept until its result arrives."""

    rows: list[Request]
    epochs: list[int]
    """[num_rows] Epoch of each request; a later one means that it ended or was preempted."""
    first_positions: dict[int, int]
    """Row → first position computed, for requests with prompt logprobs."""
    ends: list[int]
    """[num_rows] tokens computed with this step; empty without a KV connector."""


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
    state_loads: list[StateCopy] = field(default_factory=list)
    state_saves: list[StateCopy] = field(default_factory=list)
    encode: list[EncodeItem] = field(default_factory=list)

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

    def start(self, request: Request) -> None:
        """Tell the worker of a request that takes its slot with this step."""
        self.starts.append(_slot_start(request))

    def planned(self, *, with_ends: bool) -> PlannedStep:
        """Return what the result will be read by. with_ends: a KV connector needs them."""
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
        ends = [r.num_computed_tokens for r in rows] if with_ends else []
        return PlannedStep(rows, epochs, first_positions, ends)

    def plan(
        self,
        step: int,
        planned: PlannedStep,
        *,
        released: Iterable[int],
        compactions: tuple[Compaction, ...],
        rejections: tuple[Rejection, ...],
        kv_metadata: bytes | None,
    ) -> StepPlan:
        """Return the plan of step number `step`. released: slots that requests left since the last
        plan. kv_metadata: the KV connector's, encoded."""
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
            compactions=compactions,
            state_loads=tuple(self.state_loads),
            state_saves=tuple(self.state_saves),
            encode=tuple(self.encode),
            num_drafts=(0,) * num_decodes + drafts + (0,) * len(self.chunks) if drafts else (),
            rejections=rejections,
            kv_metadata=kv_metadata,
        )


def _slot_start(request: Request) -> SlotStart:
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
        num_source_tokens=len(request.source_token_ids),
    )
