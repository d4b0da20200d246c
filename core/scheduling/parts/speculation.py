"""Drafts per row, and their acceptance."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from ...outputs import DraftUsage
from ...parts.speculation import NAME, DraftPlan, DraftResult, DraftStart, Rejection
from ...request import Request
from ...step import PartPlan, StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .draft_widths import DraftWidths, RowDrafts, SearchRests
from .part import PartServices, SchedulerPart


class Speculation(SchedulerPart):
    """Plans rows with drafts, and takes back rejected ones.

    A planned row counts all drafts as accepted: its tokens and blocks, and later plans', are upper
    bounds until the result.
    """

    name = NAME
    short_steps = False

    def __init__(
        self,
        services: PartServices,
        num_drafts: int,
        widths: DraftWidths,
        longest: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_drafts: most of a row; widths: how many each gets; longest: tokens of any sequence,
        so that a row is as wide as others though its request ends within it; 0: it is not."""
        self._requests = services.requests
        self._widths = widths
        self._longest = longest
        self._clock = clock
        self._last_end = -math.inf
        self._uniform = 0
        """Drafts of each row of the plan that is being made; 0: each has its own."""
        self._drafting = False
        """Whether rows of this plan may get drafts."""
        self._rests = SearchRests()
        self._told = False
        """Whether the worker knows that the search rests."""
        self._kv = kv = services.kv
        self._most_spread: int | None = None
        """Spread of a length's bounds: blocks are released by the lower and taken by the upper one,
        so it counts as part of a chunk."""
        if any(group.reach is not None for group in kv.groups):
            self._most_spread = kv.max_chunk
        self._rows: dict[Request, RowDrafts] = {}
        """Running requests that may have drafts."""
        self._any_proposed = False
        """Whether one of them may have proposals."""
        self._rejected: dict[int, int] = {}
        """Slot → rejected drafts that the worker still counts."""
        self._num_rows = self._num_verified = self._num_accepted = 0
        self._accepted_at = [0] * num_drafts
        self._key = secrets.token_bytes(16)

    @classmethod
    def maker(
        cls, num_drafts: int, widths: DraftWidths | None = None, longest: int = 0
    ) -> Callable[[PartServices], Speculation]:
        """Without `widths`, rows get all their drafts."""
        widths = widths or DraftWidths(num_drafts)
        return lambda services: cls(services, num_drafts, widths, longest)

    # ------------------------------------------------------------ plans

    def start_part(self, request: Request) -> DraftStart:
        """Return who may learn from the request's text, whoever finds its cached prefix, and what
        the caller expects of it."""
        who = repr((request.cache_salt, request.cache_extra, request.late_extra)).encode()
        digest = blake2b(who, key=self._key, digest_size=8).digest()
        prediction = request.parts.get(NAME, ())
        return DraftStart(int.from_bytes(digest, "little") >> 2, prediction)

    def begin_plan(self, builder: PlanBuilder) -> None:
        """Choose the widths of the plan's rows."""
        self._uniform, self._drafting = 0, False
        requests = self._requests
        running = requests.running.requests
        if self._rests.resting:
            self._widths.passed(resting=True)
            self._rests.goes_on(len(running))
            return
        if not self._any_proposed:
            return
        proposing = [row for row in self._rows.values() if row.likely]
        self._any_proposed = bool(proposing)
        if not proposing or builder.prompts_alone:
            return
        num_rows = sum(r.num_tokens - r.num_computed_tokens == 1 for r in running)
        if num_rows:
            admits = requests.has_free_slot and bool(requests.waiting.requests)
            alone = num_rows == len(running) and not admits
            self._uniform = self._widths.begin(num_rows, alone, proposing)
            self._drafting = self._widths.drafts
            if alone:
                self._rests.planned(self._drafting, len(running))
            if not self._drafting:
                self._widths.passed()
        if self._rests.resting:
            self._any_proposed = False
            for row in proposing:
                row.rest()
        if self._uniform:
            for request in running:
                request.look_at = 0

    def decides(self) -> bool:
        return self._drafting

    def look_at(self, request: Request) -> int | None:
        """Look at every row of a request with drafts."""
        row = self._rows.get(request)
        return None if row is None or not row.likely else 0

    def decode_tokens(self, request: Request, count: int, spare: int) -> int:
        row = self._rows.get(request)
        if not count or row is None or not (self._uniform or row.likely):
            return count
        width = self._uniform or self._widths.width(row)
        # The last token of a request is sampled, but never computed.
        end = request.max_total_tokens - 1
        if self._uniform:
            end = max(end, self._longest - 1)  # A narrower row would keep all from a recorded step.
        most = min(width, end - request.num_tokens, spare)
        if self._most_spread is not None:
            most = min(most, self._most_spread - 1 - request.num_unverified_tokens)
        return count + max(0, most)

    def plan_part(self, step: int, builder: PlanBuilder) -> DraftPlan | None:
        """Return the plan's drafts, and the worker's corrections."""
        rejected, self._rejected = self._rejected, {}
        rests = self._rests.resting
        changes, self._told = rests is not self._told, rests
        if not rejected and not builder.drafts and not changes:
            return None
        num_drafts: tuple[int, ...] = ()
        if builder.drafts:
            num_drafts = (0,) * len(builder.decodes) + tuple(builder.drafts)
            num_drafts += (0,) * len(builder.chunks)
        rejections = [Rejection(slot, count) for slot, count in rejected.items()]
        return DraftPlan(num_drafts, tuple(rejections), rests if changes else None)

    def not_taken(self, part: PartPlan) -> None:
        """Say it again."""
        if isinstance(part, DraftPlan) and part.rests is not None:
            self._told = not part.rests

    # ------------------------------------------------------------ results

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        """Measure the step, if it has no prompts, and note what was measured before it."""
        reported: DraftResult | None = result.parts.get(NAME)
        for cost in () if reported is None else reported.costs:
            self._widths.foresee(cost.rows, cost.drafts, cost.seconds)
        now = self._clock()
        seconds = now - max(self._last_end, now - result.device_seconds)
        self._last_end = now
        drafts = self._drafts(plan)
        if any(part.num_more_tokens for part in plan.parts.values()) or seconds <= 0:
            return
        if plan.slots and sum(plan.num_tokens) == len(plan.slots) + sum(drafts):
            self._widths.took(len(plan.slots), drafts, seconds)

    @staticmethod
    def _drafts(plan: StepPlan) -> tuple[int, ...]:
        part: DraftPlan | None = plan.parts.get(NAME)
        return () if part is None else part.num_drafts

    def concerns_rows(self, plan: StepPlan, result: StepResult) -> bool:
        """Drafts were verified, or there are others to come than before."""
        drafted: DraftResult | None = result.parts.get(NAME)
        if self._any_proposed or self._drafts(plan):
            return True
        return drafted is not None and any(drafted.proposed) and not self._rests.resting

    def settle(self, request: Request, row: int, plan: StepPlan, result: StepResult) -> None:
        drafted: DraftResult | None = result.parts.get(NAME)
        if (
            drafted is not None
            and drafted.proposed
            and plan.samples[row]
            and not self._rests.resting
        ):
            self._note_proposed(request, drafted.proposed[row])
        drafts = self._drafts(plan)
        if not drafts or not (num_drafts := drafts[row]):
            return
        rejected = num_drafts - max(0, result.counts[row] - 1)
        if rejected:
            self._requests.recount(request)
        request.num_unverified_tokens -= num_drafts
        if rejected:
            request.num_tokens -= rejected
            request.num_computed_tokens -= rejected
            self._kv.trim(request)
            self._rejected[request.slot] = self._rejected.get(request.slot, 0) + rejected

    def _note_proposed(self, request: Request, number: int) -> None:
        """number: -1 if the request may have none"""
        if number < 0:
            self._rows.pop(request, None)
            return
        if (row := self._rows.get(request)) is None:
            self._rows[request] = RowDrafts(number)
        else:
            row.proposes(number)
        self._any_proposed |= number > 0
        request.look_at = 0

    def kept(self, request: Request, row: int, result: StepResult, tokens: list[int]) -> None:
        drafted: DraftResult | None = result.parts.get(NAME)
        if drafted is None or not drafted.verified or not drafted.verified[row]:
            return
        if (known := self._rows.get(request)) is not None:
            self._widths.verified(known, drafted.verified[row], result.counts[row] - 1)
        # Those beyond the request's end are padding.
        left = len(tokens) + request.max_tokens - len(request.output_token_ids)
        num_verified = min(drafted.verified[row], left)
        num_accepted = min(result.counts[row] - 1, len(tokens))
        used = DraftUsage(num_accepted, num_verified - num_accepted, 1)
        before = request.draft_usage
        request.draft_usage = used if before is None else DraftUsage.total((before, used))
        self._num_rows += 1
        self._num_verified += num_verified
        self._num_accepted += num_accepted
        for place in range(num_accepted):
            self._accepted_at[place] += 1

    def leave(self, request: Request) -> None:
        self._rejected.pop(request.slot, None)
        self._rows.pop(request, None)
        request.num_unverified_tokens = 0

    @property
    def counts(self) -> dict[str, Any]:
        return {
            "spec_decode_num_drafts": self._num_rows,
            "spec_decode_num_draft_tokens": self._num_verified,
            "spec_decode_num_accepted_tokens": self._num_accepted,
            "spec_decode_num_accepted_tokens_per_pos": dict(enumerate(self._accepted_at)),
        }
