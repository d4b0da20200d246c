"""Delays plans, so that they include late requests."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...step import StepPlan, StepResult

ARRIVAL_SECONDS = 1.0
"""Without an arrival for this long, plans are not delayed."""
MARGIN_SECONDS = 0.001
MARGIN_SHARE = 0.05
"""Margin before the device needs a plan, plus this share of the running step."""
SHORTEST_DELAY = 0.001
"""Shortest delay, by the timers' precision."""
CLASSES_PER_DOUBLING = 2
"""Classes of steps per doubling of tokens."""
SHORT_STEP_SECONDS = 0.025
"""Planned duration of steps with prompts while others decode and few wait."""
SHORT_STEP_TOKENS = 512
"""Fewest tokens of such a step, and their granularity."""
STEP_UNIT = 128
"""Granularity of steps that are as long as streams allow: recorded steps have no padding there."""
FORGET = 0.02
"""Weight of a slower step than expected."""
DECODE_SHARE, BESIDE_SHARE = 0.2, 0.1
"""Weights of the last step of decode rows alone, and of the last one with prompts beside them."""
BESIDE_TOKENS = 256
"""Fewest prompt tokens of a step that tells what one costs."""
LATE_STEPS = 0.03
"""Share of steps with prompts beside decode rows that may take longer than planned."""
EXCESS_STEP, MOST_EXCESS = 0.01, 1.25
"""How much the excess that is planned for follows one step, and its bound."""
HOST_RISES, HOST_FALLS = 0.5, 0.02
"""Weights of a longer and of a shorter host time than expected."""
HOST_SPIKE = 4.0
"""Cap on a host time relative to the expected: recording a step says nothing of the next."""


class StepPace(NamedTuple):
    """The device's speed, for a step's size."""

    start: float
    """Expected start of the step being planned, in `time.monotonic`."""
    seconds_per_token: float
    """Seconds per token of steps with prompts."""
    short_step: int
    """Tokens per SHORT_STEP_SECONDS."""
    decode_seconds: float = 0.0
    """Duration of a step with just the present decode rows."""
    beside_seconds: float = 0.0
    """What each prompt token adds to that; 0: unknown."""
    excess: float = 1.0
    """Of such steps' durations over these, which few exceed."""

    def tokens_in(self, seconds: float) -> int:
        """Return the tokens of a step with prompts and decode rows that seldom takes longer."""
        seconds /= self.excess
        if self.beside_seconds:
            count = (seconds - self.decode_seconds) / self.beside_seconds
        else:
            count = seconds / self.seconds_per_token
        return max(SHORT_STEP_TOKENS, int(count / STEP_UNIT) * STEP_UNIT)


@dataclass
class _Class:
    seconds: float
    tokens: float


class StepDurations:
    """Step durations on the device by tokens. Underestimates rather: faster steps count half,
    slower ones little.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[bool, bool, int], _Class] = {}
        self.seconds_per_token = 0.0
        """Of steps with prompts of some length; 0: unknown."""
        self.decode_seconds = 0.0
        self.beside_seconds = 0.0
        """As in `StepPace`, but followed evenly: what streams are promised is no guess."""
        self.excess = 1.0

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Record a step's duration, unless its size is more than its tokens."""
        if plan.parts and plan.num_more_tokens:
            return
        tokens = plan.total_tokens
        if tokens >= SHORT_STEP_TOKENS > len(plan.slots):
            self.seconds_per_token = _smooth(self.seconds_per_token, seconds / tokens)
        self._add_decodes(plan, seconds)
        size_class = self._classes.get(_class(plan))
        if size_class is None:
            self._classes[_class(plan)] = _Class(seconds, tokens)
            return
        weight = 0.5 if seconds < size_class.seconds else FORGET
        size_class.seconds += weight * (seconds - size_class.seconds)
        size_class.tokens += weight * (tokens - size_class.tokens)

    def _add_decodes(self, plan: StepPlan, seconds: float) -> None:
        if not plan.num_tokens or plan.num_tokens[0] != 1:
            return
        prompts = plan.total_tokens - plan.num_tokens.count(1)
        if not prompts:
            self.decode_seconds = _follow(self.decode_seconds, seconds, DECODE_SHARE)
        elif prompts >= BESIDE_TOKENS and seconds > self.decode_seconds:
            if self.beside_seconds:
                expected = self.decode_seconds + prompts * self.beside_seconds
                self._note_excess(seconds > self.excess * expected)
            each = (seconds - self.decode_seconds) / prompts
            self.beside_seconds = _follow(self.beside_seconds, each, BESIDE_SHARE)

    def _note_excess(self, late: bool) -> None:
        """Rise with a late step as far as it falls in some thirty others: LATE_STEPS exceed it."""
        self.excess += EXCESS_STEP * (1.0 - LATE_STEPS if late else -LATE_STEPS)
        self.excess = min(max(self.excess, 1.0), MOST_EXCESS)

    def expected(self, plan: StepPlan) -> float:
        """Return a step's expected seconds; 0: unknown."""
        size_class = self._classes.get(_class(plan))
        if size_class is None:
            return 0.0
        return size_class.seconds * min(1.0, plan.total_tokens / max(size_class.tokens, 1.0))


def _follow(average: float, measured: float, weight: float) -> float:
    """0: unknown."""
    return average + weight * (measured - average) if average else measured


def _smooth(average: float, measured: float) -> float:
    """Follow faster steps at once and slower ones slowly; 0: unknown."""
    if not average:
        return measured
    return average + (0.5 if measured < average else FORGET) * (measured - average)


def _class(plan: StepPlan) -> tuple[bool, bool, int]:
    """Return whether the step has decode rows, whether it has prompts, and its class by tokens."""
    tokens = plan.total_tokens
    decodes = bool(plan.num_tokens) and plan.num_tokens[0] == 1
    size = int(CLASSES_PER_DOUBLING * math.log2(max(tokens, 1)))
    return decodes, tokens != len(plan.slots), size


class PlanTiming:
    """How long the next plan may wait while the device works.

    A plan made at once would run after the whole current step without requests arriving meanwhile.
    So it is made late: a margin and the host's time before the step's expected end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations = StepDurations()
        self._in_flight: collections.deque[tuple[StepPlan, float]] = collections.deque()
        """Plans and their beginnings."""
        self._last_end = -math.inf
        self._last_arrival = -math.inf
        self._host_seconds = 0.0
        """From a plan's beginning to its launch."""

    def arrived(self) -> None:
        self._last_arrival = self._clock()

    def submitted(self, plan: StepPlan, start: float) -> None:
        """Note a plan in flight; `start`: that of its planning."""
        self._in_flight.append((plan, start))

    def ended(self, plan: StepPlan, result: StepResult) -> None:
        now = self._clock()
        _, start = self._in_flight.popleft()
        launched = now - result.device_seconds
        self._durations.add(plan, now - max(self._last_end, launched))
        self._note_host_seconds(max(launched - start, 0.0))
        self._last_end = now

    def pace(self) -> StepPace | None:
        """Return the device's pace for the current plan; None: unknown."""
        each = self._durations.seconds_per_token
        if not each:
            return None
        count = SHORT_STEP_SECONDS / each / SHORT_STEP_TOKENS
        end, _ = self._expected_end()
        return StepPace(
            start=max(end, self._clock() + self._host_seconds),
            seconds_per_token=each,
            short_step=max(1, round(count)) * SHORT_STEP_TOKENS,
            decode_seconds=self._durations.decode_seconds,
            beside_seconds=self._durations.beside_seconds,
            excess=self._durations.excess,
        )

    def failed(self) -> None:
        self._in_flight.clear()

    def now(self) -> float:
        return self._clock()

    def delay(self) -> float:
        """Return how long the next plan may wait."""
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
        average = self._host_seconds
        if not average:
            self._host_seconds = seconds
        elif seconds > average:
            self._host_seconds += HOST_RISES * (min(seconds, HOST_SPIKE * average) - average)
        else:
            self._host_seconds += HOST_FALLS * (seconds - average)

    def _expected_end(self) -> tuple[float, float]:
        """Return the expected end of the steps in flight, and the last one's duration; 0:
        unknown.
        """
        end, seconds = self._last_end, 0.0
        for plan, start in self._in_flight:
            seconds = self._durations.expected(plan)
            if not seconds:
                break
            end = max(end, start + self._host_seconds) + seconds
        return end, seconds
