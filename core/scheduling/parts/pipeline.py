"""Micro-batches: the turns that requests take at the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ...request import Request
from ...step import StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .part import PartServices, SchedulerPart

STEPS_OF_BATCH = 2
"""Most steps in flight with decode rows of one micro-batch: one more than computes, as without
stages."""


class Pipeline(SchedulerPart):
    """Deals the requests that decode over as many micro-batches as there are stages.

    A request's next step begins with the token of its last one, which comes back to the first stage
    from the last. If all requests were in each step, one stage at a time would work. So a step has
    the decode rows of one micro-batch, and these take turns: while one's step is at the last stage,
    the next one's is at the stage before. Rows of prompts need no token and go into any step.

    Micro-batches decide how full the stages are, never what they compute: the first stage waits for
    every token that a step needs. So requests move between them where they become uneven.
    """

    name = "pipeline"
    sees_every_row = True
    pauses_decodes = False

    def __init__(self, num_stages: int) -> None:
        self._count = num_stages
        self._sizes = [0] * num_stages
        self._batch_of: dict[Request, int] = {}
        """Decoding request → its micro-batch."""
        self._last_step: dict[Request, int] = {}
        """Running request → the last step that samples for it."""
        self._batch = 0
        """Whose turn the plan that is being made has."""
        self._next = 0
        self._step = 0
        """Number of that plan's step."""
        self._open = 0
        """The same, if it may have another step in flight; else -1."""
        self._early: set[int] = set()
        """Steps in flight whose tokens the first stage would have to wait for."""
        self._steps: dict[int, int] = {}
        """Steps in flight → micro-batch of their decode rows; -1: they have none."""
        self._flying = [0] * num_stages
        """Steps in flight that have decode rows of each micro-batch."""

    @classmethod
    def maker(cls, num_stages: int) -> Callable[[PartServices], Pipeline]:
        """Return what makes the part."""
        return lambda services: cls(num_stages)

    # ------------------------------------------------------------ planning

    def turns(self, running: list[Request], admits: bool) -> Iterator[None]:
        """Give each micro-batch its turn at the next plan, until one has rows."""
        self._balance()
        # Prompts fill the steps between a micro-batch's turns, if there are any.
        prompts = admits or any(r.num_tokens - r.num_computed_tokens > 1 for r in running)
        used = sum(size > 0 for size in self._sizes)
        distance = self._count if prompts else max(1, used)
        self._early = {step for step in self._steps if self._step - step < distance}
        first = self._next
        for turn in range(self._count):
            batch = self._batch = (first + turn) % self._count
            self._open = batch if self._flying[batch] < STEPS_OF_BATCH else -1
            yield

    def decode_tokens(self, request: Request, count: int, spare: int) -> int:
        """Leave a decoding request out of plans that are not its micro-batch's."""
        batch = self._batch_of.get(request)
        if batch is None:
            batch = self._join_smallest(request)
        if batch != self._open or (self._early and self._last_step.get(request) in self._early):
            return 0
        return count

    def _join_smallest(self, request: Request) -> int:
        batch = self._batch_of[request] = self._sizes.index(min(self._sizes))
        self._sizes[batch] += 1
        return batch

    def plan_part(self, step: int, builder: PlanBuilder) -> None:
        """Note the plan of a step."""
        self._step, self._next = step + 1, (self._batch + 1) % self._count
        self._steps[step] = -1
        if builder.decodes:
            self._steps[step] = self._batch
            self._flying[self._batch] += 1
        prompts = [request for request in builder.prefills if request.num_pending_tokens]
        self._last_step.update(dict.fromkeys([*builder.decodes, *prompts], step))

    def _balance(self) -> None:
        """Move requests from the fullest micro-batch to the emptiest until they are even: first
        those whose tokens have been there for longest."""
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
        """Note the end of a step."""
        batch = self._steps.pop(plan.step)
        if batch >= 0:
            self._flying[batch] -= 1

    def step_failed(self, dropped: Iterable[StepResult]) -> None:
        """Note that no step is in flight any more."""
        self._steps.clear()
        self._flying = [0] * self._count

    def abandon(self) -> None:
        """Note that no step is in flight any more."""
        self.step_failed(())

    def leave(self, request: Request) -> None:
        """Note that a request does not run any more."""
        self._last_step.pop(request, None)
        batch = self._batch_of.pop(request, None)
        if batch is not None:
            self._sizes[batch] -= 1

    def micro_batch(self, request: Request) -> int | None:
        """Return the number of a decoding request's micro-batch; None: it has none yet."""
        return self._batch_of.get(request)

    def held_blocks(self, running: list[Request]) -> Iterable[int]:
        """Return no blocks."""
        assert set(self._batch_of) <= set(running), "a request that does not run has a turn"
        batches = list(self._batch_of.values())
        sizes = [batches.count(batch) for batch in range(self._count)]
        assert sizes == self._sizes, f"micro-batches have {sizes} requests, counted {self._sizes}"
        assert sum(self._flying) <= len(self._steps), "a step is counted in several micro-batches"
        return ()
