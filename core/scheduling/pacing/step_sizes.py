"""How many tokens the next step has, and whether it computes prompts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...request import Request
from .plan_timing import StepPace

FEW_WAIT = 4
"""With more than this many short steps of tokens waiting, steps are as long as they may be: more
tokens per second, and the last of them begin earlier."""
QUEUE_SHARE = 0.2
"""Decode rows wait for one step if a prompt's turn comes after more than this share of the
target."""
LATE_SHARE = 0.8
"""They wait, for several steps, if a first token would come after more than this share."""
HOPELESS = 2.0
"""A first token that comes after this many targets anyway makes no decode row wait."""
LONGEST_PAUSE = 1.5
"""Targets that decode rows wait at most, one after another."""
PAUSE_SHARE = 0.125
"""Share of the time that decode rows wait at most, so that a full engine loses little."""
LONGEST_BURST = 8.0
"""Targets of waiting that this share allows at once, after it was not used."""
TOKENS_PER_DECODE_ROW = 6
"""Fewest prompt tokens of a step per decode row that waits for it. Rows beside prompts cost little,
so where there are many, tokens per second would be lost."""


class StepSize(NamedTuple):
    """What the next step may compute."""

    budget: int
    """Most tokens."""
    prompts_alone: bool = False
    """Decode rows wait for a later step."""
    longest_whole: int = 0
    """A waiting prompt of up to this many tokens is not begun beside another prompt unless all of
    it fits: the other's first token would come later, and its own no earlier."""


class StepSizes:
    """Chooses the size of each step by the device's pace and by what waits.

    While a request decodes and few tokens wait, a step is short, so that neither its next token nor
    a new request waits for a long one. Where first tokens would miss the target, steps have prompts
    alone for a bounded time: with 40 decode rows beside it, a prompt of 512 tokens takes 8B on an
    H200 15 ms instead of 12, and the rows can catch up once no prompt waits.
    """

    def __init__(self, max_num_batched_tokens: int, *, chunked: bool, ttft_target: float) -> None:
        """chunked: whether a prompt may take several steps; if not, no step is shortened.
        ttft_target: seconds from a request's arrival to its first token; 0: decode rows never
        wait."""
        self._most = max_num_batched_tokens
        self._chunked = chunked
        self._target = ttft_target
        self._allowed = LONGEST_BURST * ttft_target
        """Seconds that decode rows may wait by PAUSE_SHARE."""
        self._last_start: float | None = None
        self._pause_start: float | None = None
        """When the first of the steps began that decode rows wait for now; None: they do not."""

    def next_size(
        self,
        pace: StepPace | None,
        num_running: int,
        prompts: Sequence[Request],
        waiting: Sequence[Request],
        num_left: Callable[[Request], int],
    ) -> StepSize:
        """Return the size of the step that is planned now.

        pace: None: not known, and steps are as long as they may be. prompts: running requests whose
        prompts are not computed. waiting: in the order in which they are admitted. num_left:
        returns the tokens of a waiting request that are to be computed; 0: it cannot be admitted
        yet.
        """
        pause_start, self._pause_start = self._pause_start, None
        most = self._most
        if pace is None or not self._chunked:
            return StepSize(most)
        self._allow_more(pace.start)
        short = min(pace.short_step, most)
        num_waiting = 0
        for request in waiting:
            num_waiting += request.num_tokens
            if num_waiting > FEW_WAIT * short:
                return StepSize(most)
        num_decodes = num_running - len(prompts)
        if not num_decodes:
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
        pauses = pace.start + seconds - begin <= LONGEST_PAUSE * self._target
        if not pauses or not self._is_urgent(pace, lefts, paused=pause_start is not None):
            return size._replace(longest_whole=short)
        self._allowed -= seconds
        self._pause_start = begin
        return StepSize(alone, prompts_alone=True, longest_whole=short)

    def end_pause(self) -> None:
        """Note that the step whose size was chosen last has decode rows after all."""
        self._pause_start = None

    def _allow_more(self, start: float) -> None:
        """Count the time since the last step towards what decode rows may wait."""
        if self._last_start is not None:
            earned = PAUSE_SHARE * max(0.0, start - self._last_start)
            self._allowed = min(LONGEST_BURST * self._target, self._allowed + earned)
        self._last_start = start

    def _is_urgent(
        self, pace: StepPace, lefts: Sequence[tuple[Request, int]], *, paused: bool
    ) -> bool:
        """Return whether decode rows are to wait for these prompts. lefts: with their tokens that
        are not computed. paused: they wait already."""
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
    """Return the tokens of a step with the first of these prompts alone: whole ones up to half a
    short step, or one more to make a quarter; of a longer one, up to a short step."""
    count = 0
    for left in lefts:
        if count >= short_step // 4 and count + left > short_step // 2:
            break
        count += min(left, short_step)
    return count
