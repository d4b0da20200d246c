"""How many drafts each row of a plan gets: as many as pay, by measurement.

A draft at place j is accepted with probability a^j, where a is the share of its request's drafts
that were accepted, older ones counting less. A step costs what such steps took lately; before the
first, in proportion to one without drafts as the device was measured in spare time. Of the kinds
of steps that a plan could be, the one with the most expected tokens per second is planned: without
drafts; all rows of one width, which is recorded; or each row with what its own drafts are worth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...config.speculative_config import MOST_DRAFTS

FORGET = 0.9
"""Weight of a request's earlier drafts at each new verification."""
UNTRIED = 0.99
"""The same, at each plan in which its drafts were not tried."""
FORGET_ALL = 0.98
"""Weight of all requests' earlier drafts at each verification: what is believed of new ones."""
HOPE = 0.3
"""Least such belief."""
BELIEF = 3.0
"""Drafts for which the belief counts."""
LEVELS = 16
"""Probabilities are told apart in so many steps."""
FASTER, SLOWER = 0.5, 0.1
"""Weights of a faster and of a slower step than those before of its kind."""
SPIKE = 4.0
"""Cap on a step relative to those before: recording a step says nothing of the next."""
EXTRA = 1 / 256
"""Cost of a draft relative to a step without any, until it was measured."""
GAIN = 1.02
"""Least gain of a step with drafts over one without."""
EVERY = 4
"""Plans for which a choice holds, or one for each row, if that is fewer."""
LIKELY = 1 / 8
"""Least chance of drafts after a result without any, so that a row may have some in the next plan.
"""
PROBE = 64
"""Plans after which it is asked whether a kind of step that is not used is tried, for its cost."""
PROBE_SHARE = 0.003
"""Share of the time that trying one kind may lose."""
EXPLORE = 0.9
"""A width that was never measured is tried if the next narrower one has so much of the best speed.
"""
PATIENCE = 16
"""Plans without drafts, though some were proposed, after which the search for them rests."""
TRIES = 4
"""The same after a rest."""
RESTS = 32, 512
"""Plans that the first rest lasts, and the longest: each lasts twice as long as the one before,
until drafts were used for a while."""
USED = 8
"""Plans that are a while."""
NEAR = 2
"""Classes whose steps are taken to cost the same if nothing nearer is known: twice the rows."""

Group: TypeAlias = tuple[int, int, int]
"""Rows alike: probability of a draft in steps of 1 / LEVELS, number of proposed drafts, chance that
there are any in steps of 1 / LEVELS."""


@dataclass(eq=False, slots=True)
class RowDrafts:
    """What is known of the drafts of one request."""

    num_proposed: int = 0
    """After its last result. Of a plan, others are verified: those after the step before it, which
    is running."""
    followed: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """Class of a number of proposed drafts → results that followed such ones, those of them with
    drafts, and their drafts; older ones count less."""
    accepted: float = 0.0
    tried: float = 0.0
    """Drafts that were compared, of which `accepted` were right; older ones count less."""
    passed: int = 0
    """Plans without any drafts that these numbers know of."""

    def proposes(self, number: int) -> None:
        """Note the drafts that were proposed after a result."""
        before = self.num_proposed.bit_length()
        times, some, total = self.followed.get(before, (0.0, 0.0, 0.0))
        self.followed[before] = (
            FORGET * times + 1, FORGET * some + (number > 0), FORGET * total + number
        )  # fmt: skip
        self.num_proposed = number

    def expected(self) -> tuple[int, float]:
        """Return how many drafts the next plan verifies if there are any, and the chance of that:
        as many as lately after such a result, or as were proposed."""
        times, some, total = self.followed.get(self.num_proposed.bit_length(), (0.0, 0.0, 0.0))
        now = self.num_proposed > 0
        some_or_now = some + now
        number = round((total + self.num_proposed) / some_or_now) if some_or_now else 0
        return number, some_or_now / (times + 1)

    @property
    def likely(self) -> bool:
        """Whether there may be drafts to verify in the next plan."""
        return self.num_proposed > 0 or self.expected()[1] >= LIKELY

    def rest(self) -> None:
        """Expect none until some are proposed again."""
        self.num_proposed = 0
        self.followed.clear()


class StepCosts:
    """Seconds of steps without prompts, by kind: rows, and drafts of each or of all."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int, int], float] = {}
        """(Class of rows, drafts of each row or -1, class of drafts in all) → seconds."""
        self._measured: dict[tuple[int, int], int] = {}
        """(Class of rows, drafts of each row or -1) → number of the last such plan."""
        self._foreseen: dict[tuple[int, int], float] = {}
        """(Class of rows, drafts of each row) → seconds on the device, before the first such
        step."""

    def foresee(self, rows: int, width: int, seconds: float) -> None:
        """Note what a step takes on the device alone, which says how it compares with others."""
        self._foreseen[_class(rows), width] = seconds

    def add(self, rows: int, width: int, drafts: int, seconds: float, plan: int) -> None:
        """Record a step. width: drafts of each row; -1: they differ. drafts: of all rows."""
        key = (_class(rows), width, 0 if width >= 0 else _class(drafts))
        self._measured[key[:2]] = plan
        known = self._seconds.get(key)
        if known is None:
            most = SPIKE * self.expected(rows, width, drafts) if self.plain(rows) else seconds
            self._seconds[key] = min(seconds, most)
            return
        weight = FASTER if seconds < known else SLOWER
        self._seconds[key] += weight * (min(seconds, SPIKE * known) - known)

    def expected(self, rows: int, width: int, drafts: int) -> float:
        """Return the seconds of such a step; where none was seen, as of those of one width, or else
        in proportion to one without drafts."""
        size = _class(rows)
        known = self._seconds.get((size, width, 0 if width >= 0 else _class(drafts)))
        if known is not None:
            return known
        plain = self.plain(rows) or 1.0
        if width > 0 and (seconds := self._compared(size, width, plain)) is not None:
            return seconds
        before, after = (0, plain), None
        for each in range(1, MOST_DRAFTS + 1) if width < 0 else ():
            seconds = self._seconds.get((size, each, 0)) or self._compared(size, each, plain)
            if seconds is not None:
                before, after = after or before, (each * rows, seconds)
                if after[0] >= drafts:
                    break
        if after is None:
            return plain * (1 + EXTRA * drafts)
        slope = max(0.0, after[1] - before[1]) / (after[0] - before[0])
        return max(plain, after[1] + slope * (drafts - after[0]))

    def _compared(self, size: int, width: int, plain: float) -> float | None:
        """Return the seconds of a step of one width by what was foreseen of it and of a step
        without drafts, which takes `plain`; None: nothing was."""
        wide, narrow = (self._foreseen.get((size, each)) for each in (width, 0))
        return None if wide is None or narrow is None else plain * max(1.0, wide / narrow)

    def plain(self, rows: int) -> float:
        """Return the seconds of a step without drafts; 0: none of about as many rows was seen, or
        foreseen."""
        size = _class(rows)
        for distance in range(NEAR + 1):
            for near in (size - distance, size + distance):
                if (known := self._seconds.get((near, 0, 0))) is not None:
                    return known
        return self._foreseen.get((size, 0), 0.0)

    def measured(self, rows: int, width: int) -> int | None:
        """Return the number of the last such plan, 0 if its cost is only foreseen; None: nothing is
        known."""
        key = _class(rows), width
        return self._measured.get(key, 0 if key in self._foreseen else None)


class SearchRests:
    """When the search for drafts rests: none of its drafts have been worth their cost for long."""

    def __init__(self) -> None:
        self.resting = False
        self._length, self._patience = RESTS[0], PATIENCE
        self._left = self._rows = self._idle = self._used = 0

    def planned(self, drafts: bool, num_rows: int) -> None:
        """Note a plan for rows with proposals, and whether any row gets drafts."""
        if drafts:
            self._idle, self._used = 0, self._used + 1
            if self._used >= USED:
                self._length, self._patience = RESTS[0], PATIENCE
            return
        self._idle, self._used = self._idle + 1, 0
        if self._idle >= self._patience:
            self.resting, self._rows = True, num_rows
            self._left, self._length = self._length, min(2 * self._length, RESTS[1])
            self._idle, self._patience = 0, TRIES

    def goes_on(self, num_rows: int) -> bool:
        """Return whether the rest lasts for one more plan: the device may have room for drafts if
        there are fewer rows."""
        self._left -= 1
        self.resting = self._left > 0 and _class(num_rows) >= _class(self._rows)
        return self.resting


def _class(number: int) -> int:
    """Return one of two classes per doubling."""
    return round(2 * math.log2(number)) if number > 0 else -1


class DraftWidths:
    """Chooses the widths of one scheduler's rows."""

    def __init__(
        self,
        num_drafts: int,
        widths: Sequence[int] = (),
        *,
        schedule: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """num_drafts: most of a row; widths: numbers to choose from, ascending; without any, each
        row gets the most. schedule: (first, last number of rows, most drafts), ascending; what is
        between two has those of the first."""
        self._num_drafts = num_drafts
        self._widths = widths
        self._schedule = schedule
        self._costs = StepCosts()
        self._accepted, self._tried = 1.0, 2.0
        """Of all requests, like those of `RowDrafts`."""
        self._most = num_drafts
        self._uniform = 0
        """Drafts of each row of the next plan; 0: each has its own."""
        self._worth = math.inf
        """Tokens that a draft must bring; infinite: no row has drafts."""
        self._own: dict[Group, int] = {}
        """Drafts of a row of the group, as far as they were asked for."""
        self._plans = self._next_choice = self._passed = 0
        self._chosen_for = (-1, False)
        self._next_probe = PROBE

    # ------------------------------------------------------------ what was found

    def verified(self, row: RowDrafts, num_drafts: int, num_accepted: int) -> None:
        """Note the verdict on a row's drafts."""
        tried = min(num_drafts, num_accepted + 1)
        row.accepted = FORGET * row.accepted + num_accepted
        row.tried = FORGET * row.tried + tried
        self._accepted = FORGET_ALL * self._accepted + num_accepted
        self._tried = FORGET_ALL * self._tried + tried

    def took(self, rows: int, drafts: Sequence[int], seconds: float) -> None:
        """Note a step of so many rows, none with a prompt. drafts: those of each; empty: none."""
        kinds = set(drafts or (0,))
        width = next(iter(kinds))
        if len(kinds) > 1 or (width and width not in self._widths):
            width = -1  # It was not recorded.
        self._costs.add(rows, width, sum(drafts), seconds, self._plans)

    def foresee(self, rows: int, width: int, seconds: float) -> None:
        """Note what the device was measured to take for a step, before any request."""
        self._costs.foresee(rows, width, seconds)

    # ------------------------------------------------------------ plans

    def begin(self, num_rows: int, alone: bool, rows: Collection[RowDrafts]) -> int:
        """Choose for the next plan. Return the width that every row gets; 0: `width` says.

        num_rows: requests that decode; alone: no prompts are beside them; rows: those with
        proposals, now or likely by then.
        """
        self._most = self._cap(num_rows)
        if not self._widths:
            return 0
        self._plans += 1
        if self._plans >= self._next_probe and alone:
            groups = self._groups(rows)
            self._choose(num_rows, alone, groups)
            self._probe(num_rows, groups)
            self._next_choice = self._plans + 1
        elif self._plans >= self._next_choice or self._chosen_for != (_class(num_rows), alone):
            self._choose(num_rows, alone, self._groups(rows))
        return self._uniform

    @property
    def drafts(self) -> bool:
        """Whether rows of the next plan may get drafts."""
        if not self._widths:
            return self._most > 0
        return bool(self._uniform) or self._worth < math.inf

    def passed(self, *, resting: bool = False) -> None:
        """Note that no row gets drafts in the next plan; resting: `begin` was not asked."""
        self._passed += 1
        self._plans += resting

    def width(self, row: RowDrafts) -> int:
        """Return the drafts of a row in a plan whose rows have their own."""
        if not self._widths:
            return self._most
        group = self._group(row)
        width = self._own.get(group)
        if width is None:
            width = self._own[group] = self._best(group, self._worth)[0]
        if not width:
            row.accepted, row.tried = UNTRIED * row.accepted, UNTRIED * row.tried
        return width

    def _cap(self, num_rows: int) -> int:
        most = self._num_drafts
        for first, _, drafts in self._schedule:
            if num_rows < first:
                break
            most = min(drafts, self._num_drafts)
        return most

    def _group(self, row: RowDrafts) -> Group:
        if missed := self._passed - row.passed:
            row.passed, untried = self._passed, UNTRIED**missed
            row.accepted, row.tried = untried * row.accepted, untried * row.tried
        belief = max(HOPE, self._accepted / self._tried)
        rate = (row.accepted + BELIEF * belief) / (row.tried + BELIEF)
        number, chance = row.expected()
        return round(LEVELS * rate), number, round(LEVELS * chance)

    def _groups(self, rows: Collection[RowDrafts]) -> Mapping[Group, int]:
        return Counter(map(self._group, rows))

    def _best(self, group: Group, worth: float) -> tuple[int, float]:
        """Return the width that brings most, and its accepted tokens. worth: tokens that the time
        of a draft would bring otherwise."""
        most = min(self._most, group[1])
        best, best_gain, best_tokens = 0, 0.0, 0.0
        for width in {min(width, most) for width in self._widths if worth < math.inf}:
            tokens = _accepted(group, width)
            if (gain := tokens - worth * width) > best_gain:
                best, best_gain, best_tokens = width, gain, tokens
        return best, best_tokens

    def _choose(self, num_rows: int, alone: bool, groups: Mapping[Group, int]) -> None:
        self._chosen_for = (_class(num_rows), alone)
        self._next_choice = self._plans + min(EVERY, num_rows)
        self._uniform, self._worth = 0, math.inf
        self._own.clear()
        costs = self._costs
        plain = costs.expected(num_rows, 0, 0)
        if alone and not costs.plain(num_rows):
            self._next_choice = self._plans + 1
            return  # Steps without drafts come first, to compare with.
        best = speed = GAIN * num_rows / plain
        for width in self._widths if alone else ():
            tokens = num_rows + _all_accepted(groups, width)
            if width > self._most:
                break
            if costs.measured(num_rows, width) is None:
                if tokens / plain > best and speed >= EXPLORE * best:
                    # Its cost is not known, and might be none.
                    self._uniform, self._next_choice = width, self._plans + 1
                    return
                continue
            speed = tokens / costs.expected(num_rows, width, width * num_rows)
            if speed > best:
                best, self._uniform = speed, width
        if alone and num_rows == 1:
            return  # What is worth its drafts is worth the next recorded width.
        for drafts in {len(groups), num_rows, num_rows * self._most} - {0}:
            seconds = costs.expected(num_rows, -1, drafts)
            worth = max(0.0, seconds - plain) / drafts * best / GAIN
            chosen = [(many, *self._best(group, worth)) for group, many in groups.items()]
            if total := sum(many * width for many, width, _ in chosen):
                tokens = num_rows + sum(many * accepted for many, _, accepted in chosen)
                speed = tokens / costs.expected(num_rows, -1, total)
                if speed > best:
                    best, self._uniform, self._worth = speed, 0, worth

    def _probe(self, num_rows: int, groups: Mapping[Group, int]) -> None:
        """Plan a kind of step that was not measured for long, if it could be the best: its cost may
        have fallen, or have been wrong."""
        self._next_probe = self._plans + PROBE
        costs, plain = self._costs, self._costs.expected(num_rows, 0, 0)
        current = -1 if not self._uniform and self._worth < math.inf else self._uniform
        now = costs.expected(num_rows, self._uniform, self._uniform * num_rows)
        speed = (num_rows + _all_accepted(groups, self._uniform)) / now
        for width in (0, *self._widths):
            last = costs.measured(num_rows, width)
            if last is None or width == current or width > self._most:
                continue
            tokens = num_rows + _all_accepted(groups, width)
            if width and tokens / plain < speed:
                continue
            seconds = min(costs.expected(num_rows, width, width * num_rows), SPIKE * plain)
            if seconds - tokens / speed <= PROBE_SHARE * (self._plans - last) * now:
                self._uniform, self._worth = width, math.inf
                self._own.clear()
                return


def _all_accepted(groups: Mapping[Group, int], width: int) -> float:
    return sum(
        many * _accepted(group, min(width, group[1])) for group, many in groups.items() if width
    )


def _accepted(group: Group, width: int) -> float:
    """Return how many of a row's drafts are accepted on average."""
    rate, chance = group[0] / LEVELS, group[2] / LEVELS
    return chance * (float(width) if rate >= 1.0 else rate * (1.0 - rate**width) / (1.0 - rate))
