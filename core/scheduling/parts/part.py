"""The scheduler half of a part: what a capability of a step decides on the event loop."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ...cache.kv_manager import KVCacheManager, PrefixHits
from ...outputs import EngineStats, FinishReason
from ...request import Request, Update
from ...step import PartPlan, StepPlan, StepResult

if TYPE_CHECKING:
    import msgspec

    from ..live_requests import LiveRequests
    from ..plan_builder import PlanBuilder
    from .part_set import SchedulerParts


class Readiness(enum.Enum):
    """Whether a waiting request may be admitted to the plan that is being made."""

    READY = "ready"
    LATER = "later"
    """Not with this plan; requests after it may be."""
    LOADING = "loading"
    """It waits for the part from now on (`Status.LOADING`), until `LiveRequests.wait_again`."""
    NO_ROOM = "no room"
    """Too few blocks are free; requests after it wait, too."""


@dataclass(frozen=True, slots=True)
class PartServices:
    """What the scheduler gives the parts that it makes."""

    kv: KVCacheManager
    requests: LiveRequests
    """All unfinished requests, and their transitions (`fail`, `end`, `preempt`, `wait_again`)."""
    parts: SchedulerParts
    """All parts; while they are made, those before this one."""
    stats: EngineStats
    """Counters since the start, which parts may add to."""
    max_num_batched_tokens: int
    chunked: bool
    """Whether a prompt may take several steps."""
    publish: Callable[[Update], None]
    """Hands out an update that belongs to no row, such as the end of a request."""
    lose_blocks: Callable[[int], None]
    """Says how many blocks are lost for good, so that requests which can never finish fail."""

    def end(self, request: Request, reason: FinishReason) -> None:
        """End an unfinished request without a token, such as in `SchedulerPart.begin_plan`."""
        self.requests.end(request, reason)
        self.publish(Update(request, [], finished=True))


class SchedulerPart:
    """Decides about one capability: what requests need for it, and what plans carry of it.

    Every method has a default that does nothing, and one that a class does not override is never
    called: a part costs what it uses. All run on the event loop; none may block. What a part
    remembers of a request is its own (`Request.parts[name]`, or a mapping), and ends with `leave`
    or `ended`.

    One that raises ends the engine, with an error that names the part's plugin; but an error of
    `settle` or `kept` ends the row's request alone, a `RequestFailed` with its text.

    Calls of a plan: `turns`, `begin_plan`; `eligible`; for rows of running requests `decode_tokens`
    or `chunk_tokens`; for waiting requests `readiness`, `cost`, then `no_room`, or `enter`,
    `chunk_tokens` and `admit`; `rows_chosen`; `plan_part`. Calls of a result: `begin_result`,
    `concerns_rows`; for each row whose request still runs `settle`, then `kept`.
    """

    name: ClassVar[str]
    """Under which it stands in plans, results and requests."""
    short_steps: ClassVar[bool] = True
    """False: steps with prompts are not kept short (`StepSizes`)."""
    pauses_decodes: ClassVar[bool] = True
    """False: decode rows never wait for the sake of first tokens (`StepSizes`)."""
    counts_late: ClassVar[bool] = True
    """False: the counters of requests must be exact whenever a result arrives."""

    # ------------------------------------------------------------ requests that wait

    def added(self, request: Request) -> None:
        """Note a new request, which waits. Its end is always noted, too (`ended`)."""

    def readiness(self, request: Request, hits: PrefixHits, reserve: int) -> Readiness:
        """Return whether a waiting request may be admitted now, and begin what makes it ready.

        hits: its cached prefix. reserve: blocks that stay free for running requests."""
        return Readiness.READY

    def cost(self, request: Request, hits: PrefixHits) -> int | None:
        """Return the free blocks that admitting a request needs besides those of its tokens; less
        than 0 if it never holds all of them. None: it must wait for another plan. Changes
        nothing."""
        return 0

    def no_room(self, request: Request, hits: PrefixHits, reserve: int) -> None:
        """Note that the first waiting request found too few free blocks."""

    def enter(self, request: Request, hits: PrefixHits) -> None:
        """Prepare for the rows of a request that has just got its slot and `hits`."""

    def admit(self, request: Request, hits: PrefixHits, builder: PlanBuilder) -> None:
        """Give a request, which has the blocks of its first row by now, what it needs."""

    def start_part(self, request: Request) -> msgspec.Struct | None:
        """Return what the worker half must know of a request that takes its slot (`SlotStart`)."""
        return None

    # ------------------------------------------------------------ rows

    def eligible(self, requests: list[Request]) -> list[Request]:
        """Return those of the running requests that may have a row in this plan, in the same order.
        The list is not to be changed. Where a part has this method plans take longer, as each
        request is looked at."""
        return requests

    def look_at(self, request: Request) -> int | None:
        """Return the number of computed tokens from which the part wants to see the request's rows;
        None: no row. Asked after `enter` and after each row that was seen; a part that wants to see
        rows earlier sets `Request.look_at` itself."""
        return None

    def decode_tokens(self, request: Request, count: int, spare: int) -> int:
        """Return how many tokens the next row of a decoding request has: `count`, 1 plus drafts, or
        0, and it gets none with this plan.

        count: as planned by the parts before. spare: tokens of the step's budget that no other row
        needs. Plans in which a part `decides` this take longer, as each request is looked at."""
        return count

    def decides(self) -> bool:
        """Return whether `decode_tokens` is to be asked in this plan; after `begin_plan`. If no
        part says so, all decoding requests get one token."""
        return True

    def chunk_tokens(self, request: Request, count: int) -> int:
        """Return how many tokens of its prompt the next row of a request has, `count` at most; 0:
        none with this plan, unless it is about to be admitted."""
        return count

    def chunk_planned(self, request: Request) -> None:
        """Note that a chunk of a prompt is in the plan, and counted as computed."""

    def relieve(self, requests: list[Request]) -> bool:
        """Give blocks back, as none are free for the next tokens of the first of these running
        requests, which have no row in this plan yet. Return whether any were."""
        return False

    # ------------------------------------------------------------ the end of requests

    def leave(self, request: Request) -> None:
        """Take back what a request has, which leaves its slot: it ended, or was preempted."""

    def invalidate(self, request: Request) -> None:
        """Let no other request find what a failed one has cached. Before `leave` and `ended`; the
        request may never have run."""

    def ended(self, request: Request) -> None:
        """Note the end of a request in any state; it has left its slot, and still has blocks."""

    # ------------------------------------------------------------ plans

    def turns(self, running: list[Request], admits: bool) -> Iterator[None]:
        """Begin to plan, once for each item, until a plan has rows. Of one part at most. admits:
        waiting requests may begin with it."""
        yield None

    def begin_plan(self, builder: PlanBuilder) -> None:
        """Prepare for the next plan, before any row is chosen."""

    def rows_chosen(self, builder: PlanBuilder) -> bool:
        """Note that rows were chosen. Return whether waiting requests have become ready by that, so
        that they are admitted to the same plan."""
        return False

    def needs_plan(self) -> bool:
        """Return whether a plan is needed though no request has a row."""
        return False

    def must_step(self) -> bool:
        """Return whether a step without rows must run, even while the engine launches no others
        (it is paused)."""
        return False

    def plan_part(self, step: int, builder: PlanBuilder) -> PartPlan | None:
        """Return what goes with the plan of this step, and begin the next one. Rows and counters of
        requests are final."""
        return None

    def not_taken(self, part: PartPlan) -> None:
        """Note that the executor did not take the last plan. `step_failed` follows."""

    # ------------------------------------------------------------ results

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        """Process what the worker half reports, and note the end of a step."""

    def concerns_rows(self, plan: StepPlan, result: StepResult) -> bool:
        """Return whether `settle` and `kept` are to be asked about the rows of this result; after
        `begin_result`."""
        return True

    def settle(self, request: Request, row: int, plan: StepPlan, result: StepResult) -> None:
        """Process the result of a row, before its tokens are added to the request."""

    def kept(
        self, request: Request, row: int, result: StepResult, tokens: list[int]
    ) -> FinishReason | None:
        """Note the tokens of a row that its request has kept. Return why the request ends with
        them, if it has not ended; None: it goes on."""
        return None

    def step_failed(self, dropped: Iterable[StepResult]) -> None:
        """Note that a step failed as a whole: no step is in flight any more, running requests were
        preempted, and the worker has forgotten all slots. dropped: results of later steps."""

    def weights_changed(self) -> None:
        """Note that the next plan computes with other weights. No step is in flight; running
        requests may go on with what they have cached."""

    def abandon(self) -> None:
        """Note that the device is lost: no further result will come. All requests have ended."""

    # ------------------------------------------------------------ looking in

    @property
    def counts(self) -> dict[str, Any]:
        """Return what is counted here, since the start: fields of `EngineStats`, or names of the
        part's own, which are in `EngineStats.part_counts` and in the metric
        `jackfield:part_count_total`."""
        return {}

    def awaited(self) -> Iterable[Request]:
        """Return the requests that wait for the part (`Readiness.LOADING`)."""
        return ()

    def held_blocks(self, running: list[Request]) -> Iterable[int]:
        """Return the KV blocks that the part holds, one entry per reference. Raises AssertionError
        if what it remembers contradicts the running requests."""
        return ()


PartMaker: TypeAlias = Callable[[PartServices], SchedulerPart]
