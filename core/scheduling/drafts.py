"""How many drafts rows get, and what results make of them."""

from __future__ import annotations

from typing import Any

from ..cache.kv_manager import KVCacheManager
from ..request import Request
from ..step import Rejection, StepPlan, StepResult


class DraftBooks:
    """Plans rows with drafts, and takes back what was counted for rejected ones.

    A planned row counts as if all of its drafts were accepted: its tokens and blocks are upper
    bounds until its result is there, and so is all that is planned upon it.
    """

    def __init__(self, num_drafts: int, kv: KVCacheManager) -> None:
        """num_drafts: of a row, at most."""
        self._num_drafts = num_drafts
        self._kv = kv
        self._most_spread: int | None = None
        """Tokens between the bounds of a length, at most: blocks out of reach are given back by
        the lower bound, and taken by the upper one, so that this many count as one chunk."""
        if any(group.reach is not None for group in kv.groups):
            self._most_spread = kv.max_chunk
        self._rejected: dict[int, int] = {}
        """Slot → rejected drafts that the worker still counts."""
        self._num_rows = self._num_verified = self._num_accepted = 0
        self._accepted_at = [0] * num_drafts

    # ------------------------------------------------------------ plans

    def wanted(self, request: Request, spare: int) -> int:
        """Return the drafts of a decoding request's next row. spare: tokens of the step's budget
        that no other row needs.

        None if the speculator had none for it, as far as results tell; that may be a step ago.
        """
        if not request.num_proposed:
            return 0
        # The last token of a request is sampled, but never computed.
        left = request.max_total_tokens - request.num_tokens - 1
        most = min(self._num_drafts, left, spare)
        if self._most_spread is not None:
            most = min(most, self._most_spread - 1 - request.num_unverified_tokens)
        return max(0, most)

    def take_rejections(self) -> tuple[Rejection, ...]:
        """Return what the worker must take back before the rows of the next plan."""
        if not self._rejected:
            return ()
        rejected, self._rejected = self._rejected, {}
        return tuple(Rejection(slot, count) for slot, count in rejected.items())

    # ------------------------------------------------------------ results

    def settle(
        self, request: Request, row: int, plan: StepPlan, result: StepResult, num_new: int
    ) -> None:
        """Make a request's counters exact for one row, which has brought `num_new` tokens."""
        if result.proposed and plan.samples[row]:
            request.num_proposed = result.proposed[row]
        num_drafts = plan.num_drafts[row] if plan.num_drafts else 0
        if not num_drafts:
            return
        rejected = num_drafts - max(0, num_new - 1)
        request.num_unverified_tokens -= num_drafts
        if rejected:
            request.num_tokens -= rejected
            request.num_computed_tokens -= rejected
            self._kv.trim(request)
            self._rejected[request.slot] = self._rejected.get(request.slot, 0) + rejected

    def count(self, row: int, result: StepResult, num_accepted: int) -> None:
        """Count a verified row for the metrics. num_accepted: drafts among the tokens that the
        request keeps."""
        if not result.verified or not result.verified[row]:
            return
        self._num_rows += 1
        self._num_verified += result.verified[row]
        self._num_accepted += num_accepted
        for place in range(num_accepted):
            self._accepted_at[place] += 1

    def withdraw(self, request: Request) -> None:
        """Forget a request's drafts, as it leaves its slot."""
        self._rejected.pop(request.slot, None)
        request.num_proposed = request.num_unverified_tokens = 0

    @property
    def counts(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that are counted here."""
        return {
            "spec_decode_num_drafts": self._num_rows,
            "spec_decode_num_draft_tokens": self._num_verified,
            "spec_decode_num_accepted_tokens": self._num_accepted,
            "spec_decode_num_accepted_tokens_per_pos": dict(enumerate(self._accepted_at)),
        }
