"""Drafts per row, and their acceptance."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from ...parts.speculation import NAME, DraftPlan, DraftResult, DraftStart, Rejection
from ...request import Request
from ...step import StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .part import PartServices, SchedulerPart


class Speculation(SchedulerPart):
    """Plans rows with drafts, and takes back rejected ones.

    A planned row counts all drafts as accepted: its tokens and blocks, and later plans', are upper
    bounds until the result.
    """

    name = NAME
    short_steps = False

    def __init__(self, services: PartServices, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._kv = kv = services.kv
        self._most_spread: int | None = None
        """Spread of a length's bounds: blocks are released by the lower and taken by the upper one,
        so it counts as part of a chunk."""
        if any(group.reach is not None for group in kv.groups):
            self._most_spread = kv.max_chunk
        self._num_proposed: dict[Request, int] = {}
        """Running request → drafts proposed after its last result."""
        self._rejected: dict[int, int] = {}
        """Slot → rejected drafts that the worker still counts."""
        self._num_rows = self._num_verified = self._num_accepted = 0
        self._accepted_at = [0] * num_drafts
        self._key = secrets.token_bytes(16)

    @classmethod
    def maker(cls, num_drafts: int) -> Callable[[PartServices], Speculation]:
        return lambda services: cls(services, num_drafts)

    # ------------------------------------------------------------ plans

    def start_part(self, request: Request) -> DraftStart:
        """Return who may learn from the request's text: whoever finds its cached prefix."""
        who = repr((request.cache_salt, request.cache_extra, request.late_extra)).encode()
        digest = blake2b(who, key=self._key, digest_size=8).digest()
        return DraftStart(int.from_bytes(digest, "little") >> 2)

    def look_at(self, request: Request) -> int | None:
        """Look at every row of a request with drafts."""
        return 0 if request in self._num_proposed else None

    def decode_tokens(self, request: Request, count: int, spare: int) -> int:
        if not count or request not in self._num_proposed:
            return count
        # The last token of a request is sampled, but never computed.
        left = request.max_total_tokens - request.num_tokens - 1
        most = min(self._num_drafts, left, spare)
        if self._most_spread is not None:
            most = min(most, self._most_spread - 1 - request.num_unverified_tokens)
        return count + max(0, most)

    def plan_part(self, step: int, builder: PlanBuilder) -> DraftPlan | None:
        """Return the plan's drafts, and the worker's corrections."""
        rejected, self._rejected = self._rejected, {}
        if not rejected and not builder.drafts:
            return None
        num_drafts: tuple[int, ...] = ()
        if builder.drafts:
            num_drafts = (0,) * len(builder.decodes) + tuple(builder.drafts)
            num_drafts += (0,) * len(builder.chunks)
        rejections = [Rejection(slot, count) for slot, count in rejected.items()]
        return DraftPlan(num_drafts, tuple(rejections))

    # ------------------------------------------------------------ results

    def settle(self, request: Request, row: int, plan: StepPlan, result: StepResult) -> None:
        drafted: DraftResult | None = result.parts.get(NAME)
        if drafted is not None and drafted.proposed and plan.samples[row]:
            if num_proposed := drafted.proposed[row]:
                self._num_proposed[request] = num_proposed
                request.look_at = 0
            else:
                self._num_proposed.pop(request, None)
        planned: DraftPlan | None = plan.parts.get(NAME)
        if planned is None or not planned.num_drafts or not planned.num_drafts[row]:
            return
        num_drafts = planned.num_drafts[row]
        rejected = num_drafts - max(0, result.counts[row] - 1)
        request.num_unverified_tokens -= num_drafts
        if rejected:
            request.num_tokens -= rejected
            request.num_computed_tokens -= rejected
            self._kv.trim(request)
            self._rejected[request.slot] = self._rejected.get(request.slot, 0) + rejected

    def kept(self, request: Request, row: int, result: StepResult, tokens: list[int]) -> None:
        drafted: DraftResult | None = result.parts.get(NAME)
        if drafted is None or not drafted.verified or not drafted.verified[row]:
            return
        num_accepted = min(result.counts[row] - 1, len(tokens))
        self._num_rows += 1
        self._num_verified += drafted.verified[row]
        self._num_accepted += num_accepted
        for place in range(num_accepted):
            self._accepted_at[place] += 1

    def leave(self, request: Request) -> None:
        self._rejected.pop(request.slot, None)
        self._num_proposed.pop(request, None)
        request.num_unverified_tokens = 0

    @property
    def counts(self) -> dict[str, Any]:
        return {
            "spec_decode_num_drafts": self._num_rows,
            "spec_decode_num_draft_tokens": self._num_verified,
            "spec_decode_num_accepted_tokens": self._num_accepted,
            "spec_decode_num_accepted_tokens_per_pos": dict(enumerate(self._accepted_at)),
        }
