"""When to make the next plan: late, so that requests that arrive meanwhile are in it."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...step import StepPlan, StepResult

ARRIVAL_SECONDS = 1.0
"""Without an arrival for this long, plans are made at once: no request would gain."""
MARGIN_SECONDS = 0.001
MARGIN_SHARE = 0.05
"""A plan is launched this long, and this share of the running step, before the device needs it."""
SHORTEST_DELAY = 0.001
"""Less is not waited for: the event loop's timers are no finer."""
CLASSES_PER_DOUBLING = 2
"""Classes of steps by number of tokens, whose durations are kept apart."""
SHORT_STEP_SECONDS = 0.025
"""Steps with prompts are planned to take about this long while others decode and few wait."""
SHORT_STEP_TOKENS = 512
"""Fewest tokens of such a step, and what their number is a multiple of."""
FORGET = 0.02
"""Weight of the newest step where it is slower than expected."""
HOST_RISES, HOST_FALLS = 0.5, 0.02
"""Weights of the host's newest time where it is longer than expected, or shorter."""
HOST_SPIKE = 4.0
"""A longer one counts as at most so many times what was expected: a plan that waited while a step
was recorded says nothing of the next."""


class StepPace(NamedTuple):
    """How fast the device is, for the choice of a step's size."""

    start: float
    """When the step that is planned now is expected to begin: seconds of `time.monotonic`."""
    seconds_per_token: float
    """Of steps with prompts."""
    short_step: int
    """Tokens of a step that takes SHORT_STEP_SECONDS."""


@dataclass
class _Class:
    """Durations of steps of similar size."""

    seconds: float
    tokens: float


class StepDurations:
    """How long steps take on the device, by number of tokens. Its estimates are rather too short
    than too long: a fast step counts half at once, a slow one little."""

    def __init__(self) -> None:
        self._classes: dict[tuple[bool, bool, int], _Class] = {}
        self.seconds_per_token = 0.0
        """Of steps with prompts of some length; 0: none is known."""

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of one step; not of one whose size is more than its tokens."""
        if plan.parts and plan.num_more_tokens:
            return
        tokens = plan.total_tokens
        if tokens >= SHORT_STEP_TOKENS > len(plan.slots):
            self.seconds_per_token = _smooth(self.seconds_per_token, seconds / tokens)
        known = self._classes.get(_class(plan))
        if known is None:
            self._classes[_class(plan)] = _Class(seconds, tokens)
            return
        weight = 0.5 if seconds < known.seconds else FORGET
        known.seconds += weight * (seconds - known.seconds)
        known.tokens += weight * (tokens - known.tokens)

    def expected(self, plan: StepPlan) -> float:
        """Return the seconds that a step will take; 0 if no step of its class is known."""
        known = self._classes.get(_class(plan))
        if known is None:
            return 0.0
        return known.seconds * min(1.0, plan.total_tokens / max(known.tokens, 1.0))


def _smooth(known: float, measured: float) -> float:
    """Return a duration that follows faster steps at once and slower ones slowly; 0: unknown."""
    if not known:
        return measured
    return known + (0.5 if measured < known else FORGET) * (measured - known)


def _class(plan: StepPlan) -> tuple[bool, bool, int]:
    """Return whether the step has decode rows, which come first, whether it has prompts, and its
    tokens' part of a doubling."""
    tokens = plan.total_tokens
    decodes = bool(plan.num_tokens) and plan.num_tokens[0] == 1
    size = int(CLASSES_PER_DOUBLING * math.log2(max(tokens, 1)))
    return decodes, tokens != len(plan.slots), size


class PlanTiming:
    """Tells how long the next plan may wait while the device works on those before it.

    A plan made at once would run after the whole step that has just begun, without the requests
    that arrive during that step. It is made instead as late as the device allows: a margin before
    the step in flight is expected to end, and the host's own time before that.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._durations = StepDurations()
        self._in_flight: collections.deque[tuple[StepPlan, float]] = collections.deque()
        """Plans, and when each was begun."""
        self._last_end = -math.inf
        self._last_arrival = -math.inf
        self._host_seconds = 0.0
        """From the beginning of a plan to that of its launch."""

    def arrived(self) -> None:
        """Note that a request has arrived."""
        self._last_arrival = self._clock()

    def submitted(self, plan: StepPlan, begun: float) -> None:
        """Note a plan that is in flight now; `begun`: when its planning began."""
        self._in_flight.append((plan, begun))

    def ended(self, plan: StepPlan, result: StepResult) -> None:
        """Note the result of the first plan in flight."""
        now = self._clock()
        _, begun = self._in_flight.popleft()
        launched = now - result.device_seconds
        self._durations.add(plan, now - max(self._last_end, launched))
        self._note_host_seconds(max(launched - begun, 0.0))
        self._last_end = now

    def pace(self) -> StepPace | None:
        """Return the device's pace for a step that is planned now; None: not known yet."""
        each = self._durations.seconds_per_token
        if not each:
            return None
        count = SHORT_STEP_SECONDS / each / SHORT_STEP_TOKENS
        end, _ = self._expected_end()
        return StepPace(
            start=max(end, self._clock() + self._host_seconds),
            seconds_per_token=each,
            short_step=max(1, round(count)) * SHORT_STEP_TOKENS,
        )

    def failed(self) -> None:
        """Note that no plan is in flight any more, after one that failed."""
        self._in_flight.clear()

    def now(self) -> float:
        """Return the clock's seconds."""
        return self._clock()

    def delay(self) -> float:
        """Return the seconds that the next plan may wait: 0 to make it now."""
        now = self._clock()
        if not self._in_flight or now - self._last_arrival > ARRIVAL_SECONDS:
            return 0.0
        end, seconds = self._expected_end()
        if not seconds:
            return 0.0
        lead = self._host_seconds + MARGIN_SECONDS + MARGIN_SHARE * seconds
        delay = end - lead - now
        return delay if delay >= SHORTEST_DELAY else 0.0

    def _note_host_seconds(self, seconds: float) -> None:
        known = self._host_seconds
        if not known:
            self._host_seconds = seconds
        elif seconds > known:
            self._host_seconds += HOST_RISES * (min(seconds, HOST_SPIKE * known) - known)
        else:
            self._host_seconds += HOST_FALLS * (seconds - known)

    def _expected_end(self) -> tuple[float, float]:
        """Return when the steps in flight are expected to have ended, and the seconds that the last
        of them takes; 0: not known, or nothing is in flight."""
        end, seconds = self._last_end, 0.0
        for plan, begun in self._in_flight:
            seconds = self._durations.expected(plan)
            if not seconds:
                break
            end = max(end, begun + self._host_seconds) + seconds
        return end, seconds
