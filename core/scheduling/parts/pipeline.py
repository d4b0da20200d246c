"""Micro-batches for pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ...request import Request
from ...step import StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .part import PartServices, SchedulerPart

STEPS_OF_BATCH = 2
"""Most steps in flight per micro-batch of decode rows: one more than computes."""


class Pipeline(SchedulerPart):
    """Deals decoding requests over as many micro-batches as stages.

    A request's next step needs the last stage's token, so with all requests in each step only one
    stage would work. So each step has one micro-batch's decode rows, in turn; prompts go into any
    step.

    Micro-batches affect only how full stages are: the first stage waits for every token needed. So
    requests may move between them.
    """

    name = "pipeline"
    pauses_decodes = False

    def __init__(self, num_stages: int) -> None:
        self._count = num_stages
        self._sizes = [0] * num_stages
        self._batch_of: dict[Request, int] = {}
        self._last_step: dict[Request, int] = {}
        """Running request → last step that samples for it."""
        self._batch = 0
        """Micro-batch of the current plan."""
        self._next = 0
        self._step = 0
        self._open = 0
        """The current step if its micro-batch may have another in flight; else -1."""
        self._early: set[int] = set()
        """Steps in flight whose tokens the first stage would wait for."""
        self._steps: dict[int, int] = {}
        """Step in flight → micro-batch of its decode rows, or -1."""
        self._flying = [0] * num_stages
        """Steps in flight per micro-batch."""

    @classmethod
    def maker(cls, num_stages: int) -> Callable[[PartServices], Pipeline]:
        return lambda services: cls(num_stages)

    # ------------------------------------------------------------ planning

    def turns(self, running: list[Request], admits: bool) -> Iterator[None]:
        """Try each micro-batch for the next plan until one has rows."""
        self._balance()
        # Prompts fill the steps between a micro-batch's turns, if there are any.
        prompts = admits or (
            len(running) > len(self._batch_of)
            and any(r.num_tokens - r.num_computed_tokens > 1 for r in running)
        )
        used = sum(size > 0 for size in self._sizes)
        distance = self._count if prompts else max(1, used)
        self._early = {step for step in self._steps if self._step - step < distance}
        first = self._next
        for turn in range(self._count):
            batch = self._batch = (first + turn) % self._count
            self._open = batch if self._flying[batch] < STEPS_OF_BATCH else -1
            yield

    def eligible(self, requests: list[Request]) -> list[Request]:
        """Exclude decoding requests of other micro-batches."""
        batch_of, last_step, early, batch = self._batch_of, self._last_step, self._early, self._open
        chosen = []
        for request in requests:
            if request.num_tokens - request.num_computed_tokens == 1:
                own = batch_of.get(request)
                if own is None:
                    own = self._join_smallest(request)
                if own != batch or (early and last_step.get(request) in early):
                    continue
            chosen.append(request)
        return chosen

    def _join_smallest(self, request: Request) -> int:
        batch = self._batch_of[request] = self._sizes.index(min(self._sizes))
        self._sizes[batch] += 1
        return batch

    def plan_part(self, step: int, builder: PlanBuilder) -> None:
        self._step, self._next = step + 1, (self._batch + 1) % self._count
        self._steps[step] = -1
        decodes = [*builder.decodes, *builder.drafted]
        if decodes:
            self._steps[step] = self._batch
            self._flying[self._batch] += 1
        prompts = [request for request in builder.prefills if request.num_pending_tokens]
        self._last_step.update(dict.fromkeys([*decodes, *prompts], step))

    def _balance(self) -> None:
        """Even out micro-batches, moving requests with the oldest tokens first."""
        while max(self._sizes) - min(self._sizes) > 1:
            fullest = self._sizes.index(max(self._sizes))
            moved = min(
                (request for request, batch in self._batch_of.items() if batch == fullest),
                key=lambda request: self._last_step.get(request, -1),
            )
            self._sizes[fullest] -= 1
            self._join_smallest(moved)

    # ------------------------------------------------------------ results

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        batch = self._steps.pop(plan.step)
        if batch >= 0:
            self._flying[batch] -= 1

    def step_failed(self, dropped: Iterable[StepResult]) -> None:
        self._steps.clear()
        self._flying = [0] * self._count

    def abandon(self) -> None:
        self.step_failed(())

    def leave(self, request: Request) -> None:
        self._last_step.pop(request, None)
        batch = self._batch_of.pop(request, None)
        if batch is not None:
            self._sizes[batch] -= 1

    def micro_batch(self, request: Request) -> int | None:
        return self._batch_of.get(request)

    def held_blocks(self, running: list[Request]) -> Iterable[int]:
        assert set(self._batch_of) <= set(running), "a request that does not run has a turn"
        batches = list(self._batch_of.values())
        sizes = [batches.count(batch) for batch in range(self._count)]
        assert sizes == self._sizes, f"micro-batches have {sizes} requests, counted {self._sizes}"
        assert sum(self._flying) <= len(self._steps), "a step is counted in several micro-batches"
        return ()
