"""The next step's tokens, and whether it has only prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...request import Request
from .plan_timing import SHORT_STEP_SECONDS, StepPace

FEW_WAIT = 4
"""Beyond this many short steps of waiting tokens, steps have full length."""
QUEUE_SHARE = 0.2
"""Decode rows pause for a step if a prompt would wait for more than this share of the target."""
LATE_SHARE = 0.8
"""They pause for several steps if a first token would be later than this share."""
HOPELESS = 2.0
"""Beyond this many targets, decode rows do not pause."""
LONGEST_PAUSE = 1.5
"""Longest pause in targets for first tokens."""
PAUSE_SHARE = 0.125
"""Share of time for pauses, so that a full engine loses little."""
LONGEST_BURST = 8.0
"""Targets of unused pauses that may accumulate."""
TOKENS_PER_DECODE_ROW = 6
"""Fewest prompt tokens per pausing decode row: rows beside prompts are cheap, so many of them would
cost throughput."""


class StepSize(NamedTuple):
    budget: int
    prompts_alone: bool = False
    """Decode rows pause."""
    longest_whole: int = 0
    """A waiting prompt of up to this many tokens begins beside another only as a whole: otherwise
    it would delay the other's first token without gain."""


class StepSizes:
    """Chooses the size of each step by the device's pace and by what waits.

    While requests decode and few tokens wait, steps are short, for the next token and new requests.
    When first tokens would miss their target, decode rows pause for a bounded time. While streams
    decode, no step with prompts and no pause makes the next token of one later than its target:
    where both targets cannot be kept, first tokens give way.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        chunked: bool,
        ttft_target: float,
        itl_target: float = 0.0,
    ) -> None:
        """chunked: whether steps may split prompts; if not, none is shortened. ttft_target: seconds
        to a first token; 0: decode rows never pause. itl_target: seconds between two tokens of a
        stream; 0: any.
        """
        self._most = max_num_batched_tokens
        self._chunked = chunked
        self._target = ttft_target
        self._itl_target = itl_target
        self._allowed = LONGEST_BURST * ttft_target
        """Seconds of pauses left by PAUSE_SHARE."""
        self._last_start: float | None = None
        self._pause_start: float | None = None
        """Start of the current pause, or None."""

    def next_size(
        self,
        pace: StepPace | None,
        num_running: int,
        prompts: Sequence[Request],
        waiting: Sequence[Request],
        num_left: Callable[[Request], int],
        has_streams: Callable[[], bool],
    ) -> StepSize:
        """Return the size of the step being planned.

        pace: None: unknown, steps have full length. prompts: running requests with prompts left.
        waiting: in order of admission. num_left: a waiting request's tokens to compute; 0: not
        admissible yet. has_streams: whether a decoding request's tokens are sent one by one.
        """
        pause_start, self._pause_start = self._pause_start, None
        most = self._most
        if pace is None or not self._chunked:
            return StepSize(most)
        self._allow_more(pace.start)
        num_decodes = num_running - len(prompts)
        if not num_decodes:
            return StepSize(most)
        streams = bool(self._itl_target and (prompts or waiting)) and has_streams()
        if streams:
            most = min(most, pace.tokens_in(self._itl_target))
        short = min(pace.short_step, most)
        num_waiting = 0
        for request in waiting:
            num_waiting += request.num_tokens
            if num_waiting > FEW_WAIT * short:
                return StepSize(most)
        size = StepSize(min(most, max(short, num_running + short // 2)))
        if not self._target or not (prompts or waiting):
            return size
        lefts = [(request, request.num_tokens - request.num_computed_tokens) for request in prompts]
        lefts += [(request, left) for request in waiting if (left := num_left(request))]
        alone = _tokens_alone([left for _, left in lefts], short)
        seconds = pace.seconds_per_token * alone
        if alone < max(short // 4, TOKENS_PER_DECODE_ROW * num_decodes) or seconds > self._allowed:
            return size
        begin = pace.start if pause_start is None else pause_start
        longest = LONGEST_PAUSE * self._target
        if streams:  # Their next token comes with a short step after it.
            longest = min(longest, self._itl_target - SHORT_STEP_SECONDS)
        pauses = pace.start + seconds - begin <= longest
        if not pauses or not self._is_urgent(pace, lefts, paused=pause_start is not None):
            return size._replace(longest_whole=short)
        self._allowed -= seconds
        self._pause_start = begin
        return StepSize(alone, prompts_alone=True, longest_whole=short)

    def end_pause(self) -> None:
        """The last chosen step has decode rows after all."""
        self._pause_start = None

    def _allow_more(self, start: float) -> None:
        """Extend the permitted pauses by the time since the last step."""
        if self._last_start is not None:
            earned = PAUSE_SHARE * max(0.0, start - self._last_start)
            self._allowed = min(LONGEST_BURST * self._target, self._allowed + earned)
        self._last_start = start

    def _is_urgent(
        self, pace: StepPace, lefts: Sequence[tuple[Request, int]], *, paused: bool
    ) -> bool:
        """Return whether decode rows must pause for these prompts. lefts: with tokens to compute.
        paused: already pausing.
        """
        target = self._target
        turn = pace.start
        for request, left in lefts:
            seconds = pace.seconds_per_token * left
            queued = turn - request.arrival
            turn += seconds
            if seconds > target or queued + seconds > HOPELESS * target:
                continue
            if queued + seconds > LATE_SHARE * target:
                return True
            if queued > QUEUE_SHARE * target and not paused:
                return True
        return False


def _tokens_alone(lefts: Sequence[int], short_step: int) -> int:
    """Return the tokens of a step with only the first prompts: whole ones up to half a short step,
    or one more to make a quarter; of a longer one, up to a short step.
    """
    count = 0
    for left in lefts:
        if count >= short_step // 4 and count + left > short_step // 2:
            break
        count += min(left, short_step)
    return count
