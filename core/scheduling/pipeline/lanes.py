"""Lanes: the turns that requests take at the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...request import Request

STEPS_OF_LANE = 2
"""Most steps in flight with decode rows of one lane: one more than computes, as without stages."""


class Lanes:
    """Deals the requests that decode over as many lanes as there are stages.

    A request's next step begins with the token of its last one, which comes back to the first stage
    from the last. If all requests were in each step, one stage at a time would work. So a step has
    the decode rows of one lane, and lanes take turns: while one lane's step is at the last stage,
    the next lane's is at the one before. Rows of prompts need no token and go into any step.

    Lanes decide how full the stages are, never what they compute: the first stage waits for every
    token that a step needs. So requests move between lanes where these become uneven.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._sizes = [0] * count
        self._lane = 0
        """Whose turn the plan that is being made has."""
        self._next = 0
        self._step = 0
        """Number of that plan's step."""
        self._distance = 1
        """Steps until the first stage can have a token without waiting for it."""
        self._steps: dict[int, int] = {}
        """Steps in flight → lane of their decode rows; -1: they have none."""
        self._flying = [0] * count
        """Steps in flight that have decode rows of each lane."""

    # ------------------------------------------------------------ planning

    def turns(self, running: Sequence[Request], admits: bool) -> Iterator[None]:
        """Give each lane its turn at the next plan, until one has rows. admits: waiting requests
        may begin with it."""
        self._balance(running)
        # Prompts fill the steps between a lane's turns, if there are any.
        prompts = admits or any(r.num_tokens - r.num_computed_tokens > 1 for r in running)
        used = sum(size > 0 for size in self._sizes)
        self._distance = self._count if prompts else max(1, used)
        first = self._next
        for turn in range(self._count):
            self._lane = (first + turn) % self._count
            yield

    def takes(self, request: Request) -> bool:
        """Return whether a request's next token may be computed in this plan."""
        if request.lane < 0:
            request.lane = self._sizes.index(min(self._sizes))
            self._sizes[request.lane] += 1
        if request.lane != self._lane or self._flying[self._lane] >= STEPS_OF_LANE:
            return False
        last = request.last_step
        return last not in self._steps or self._step - last >= self._distance

    def planned(self, step: int, decodes: Sequence[Request], sampled: Iterable[Request]) -> None:
        """Note a plan. decodes: its rows that had to be taken; sampled: all that get a token."""
        self._step, self._next = step + 1, (self._lane + 1) % self._count
        self._steps[step] = -1
        if decodes:
            self._steps[step] = self._lane
            self._flying[self._lane] += 1
        for request in sampled:
            request.last_step = step

    def _balance(self, running: Sequence[Request]) -> None:
        """Move requests from the fullest lane to the emptiest until they are even: first those
        whose tokens have been there for longest."""
        while max(self._sizes) - min(self._sizes) > 1:
            fullest = self._sizes.index(max(self._sizes))
            moved = min(
                (request for request in running if request.lane == fullest),
                key=lambda request: request.last_step,
            )
            self.leave(moved)
            moved.lane = self._sizes.index(min(self._sizes))
            self._sizes[moved.lane] += 1

    # ------------------------------------------------------------ results

    def ended(self, step: int) -> None:
        """Note the result of a step."""
        lane = self._steps.pop(step)
        if lane >= 0:
            self._flying[lane] -= 1

    def forget_steps(self) -> None:
        """Note that no step is in flight any more."""
        self._steps.clear()
        self._flying = [0] * self._count

    def leave(self, request: Request) -> None:
        """Note that a request does not run any more."""
        if request.lane >= 0:
            self._sizes[request.lane] -= 1
            request.lane = -1

    def check(self, running: Iterable[Request]) -> None:
        """Raise AssertionError if the books contradict the requests."""
        lanes = [request.lane for request in running if request.lane >= 0]
        sizes = [lanes.count(lane) for lane in range(self._count)]
        assert sizes == self._sizes, f"lanes have {sizes} requests, counted {self._sizes}"
        assert sum(self._flying) <= len(self._steps), "a step is counted in several lanes"
