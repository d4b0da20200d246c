"""The worker's parts, and those that override each method."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from ...protocols.models import HiddenStates
from ...step import StepPlan
from .part import Report, WorkerPart

if TYPE_CHECKING:
    from ..batch import LogitPlaces, StepInputs
    from ..launched_step import LaunchedStep

P = TypeVar("P", bound=WorkerPart)


class WorkerParts:
    """Calls parts in order, skipping methods that they lack."""

    def __init__(self, parts: Sequence[WorkerPart] = ()) -> None:
        self._parts = tuple(parts)
        self.per_slot = tuple(
            part for part in parts if _overrides(part, "start", "release", "upload")
        )
        """Parts with per-slot state."""
        self._moving = {part.name: part for part in parts if _overrides(part, "move")}
        self._receiving = {part.name: part for part in parts if _overrides(part, "receive")}
        self._before = [part for part in parts if _overrides(part, "before")]
        self._context = [part for part in parts if _overrides(part, "context")]
        self._computed = [part for part in parts if _overrides(part, "computed")]
        self._logit_rows = [part for part in parts if _overrides(part, "logit_rows")]
        self._graph_key = [part for part in parts if part.variants]
        self._recording = [part for part in parts if _overrides(part, "recording")]
        self.variants = tuple(variant for part in parts for variant in part.variants)
        """Recorded steps besides the plain ones."""
        self._recordable = [part for part in parts if _overrides(part, "recordable")]
        self._sampled = [part for part in parts if _overrides(part, "sampled")]
        self._drafts_verified = [part for part in parts if _overrides(part, "drafts_verified")]
        self._after = [part for part in parts if _overrides(part, "after")]
        self._poll = [part for part in parts if _overrides(part, "poll")]

    def __iter__(self) -> Iterator[WorkerPart]:
        return iter(self._parts)

    def find(self, kind: type[P]) -> P | None:
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def move(self, plan: StepPlan) -> StepPlan:
        """Let parts rearrange the cache, then receive data. Return the plan without what is
        done.
        """
        return self._moved(plan) if plan.parts else plan

    @torch.inference_mode()
    def _moved(self, plan: StepPlan) -> StepPlan:
        done = [name for name in plan.parts if name in self._moving]
        try:
            for name in done:
                self._moving[name].move(plan.parts[name], plan)
        finally:
            self.receive(plan)
        if not done:
            return plan
        rest = {name: part for name, part in plan.parts.items() if name not in done}
        return msgspec.structs.replace(plan, parts=rest)

    def receive(self, plan: StepPlan) -> None:
        """Let parts receive a plan's data, run or not."""
        for name, part in plan.parts.items():
            if (receiver := self._receiving.get(name)) is not None:
                receiver.receive(part)

    def before(self, plan: StepPlan) -> None:
        """Let parts queue work before the forward pass."""
        for part in self._before:
            part.before(plan.parts.get(part.name), plan)

    def context(self, inputs: StepInputs) -> dict[str, Any]:
        """Return parts' data for layers."""
        contexts = {part.name: part.context(inputs) for part in self._context}
        return {name: value for name, value in contexts.items() if value is not None}

    def computed(self, inputs: StepInputs, hidden: HiddenStates) -> None:
        """Let parts queue work on the forward pass's states."""
        for part in self._computed:
            part.computed(inputs, hidden)

    def logit_rows(self, places: LogitPlaces | None) -> None:
        """Let parts note whose logits are about to be computed."""
        for part in self._logit_rows:
            part.logit_rows(places)

    def graph_key(self, plan: StepPlan) -> str | None:
        """Return which recorded variant serves the step; None: the plain one."""
        for part in self._graph_key:
            if (key := part.graph_key(plan)) is not None:
                return key
        return None

    @contextlib.contextmanager
    def recording(self, variant: str | None) -> Iterator[None]:
        """Compute steps of a recorded variant."""
        with contextlib.ExitStack() as stack:
            for part in self._recording:
                stack.enter_context(part.recording(variant))
            yield

    def recordable(self, plan: StepPlan) -> bool:
        """Return whether a graph may serve the step."""
        return all([part.recordable(plan) for part in self._recordable])

    def sampled(self, plan: StepPlan, output: dict[str, torch.Tensor], rows: Sequence[int]) -> None:
        """Let parts queue work after sampling, and extend the host's output."""
        for part in self._sampled:
            part.sampled(plan, output, rows)

    def drafts_verified(self, plan: StepPlan, accepted: torch.Tensor) -> None:
        """Let parts settle what drafts left open."""
        for part in self._drafts_verified:
            part.drafts_verified(plan, accepted)

    def after(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Let parts queue work after the step, and collect reports."""
        for part in self._after:
            report = part.after(plan.parts.get(part.name), step)
            if report is not None:
                step.reports[part.name] = report
        if self._poll:
            step.reports |= self.poll()

    def poll(self) -> dict[str, Report]:
        """Return reports due even without rows."""
        polled = {part.name: part.poll() for part in self._poll}
        return {name: report for name, report in polled.items() if report is not None}

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _overrides(part: WorkerPart, *methods: str) -> bool:
    return any(getattr(type(part), name) is not getattr(WorkerPart, name) for name in methods)
