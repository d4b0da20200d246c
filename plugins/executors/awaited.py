"""Steps and jobs awaited on all ranks. Imports nothing large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import RankFailed
from ...core.step import StepPlan

AGREE_SECONDS = 3.0
"""Seconds after a step's first failure within which it must fail on all ranks."""


@dataclass
class Awaited:
    """A step or job in progress."""

    future: asyncio.Future[Any]
    plan: StepPlan | None
    """None: a job."""
    waits_for: set[int]
    """Other ranks whose reply to a job is outstanding."""
    may_differ: bool = False
    """Whether it may fail on some ranks alone: then it ends with the failure of the first one, once
    all have replied."""
    own_done: bool = False
    result: Any = None
    """Rank 0's, once `own_done`."""
    failures: dict[int, BaseException] = field(default_factory=dict)
    disputed: bool = False
    """Whether it has failed on some ranks, and the others have a deadline."""


class AwaitedCalls:
    """Steps and jobs by number. One ends once all ranks agree: with rank 0's result, or with its
    error. All on the event loop.
    """

    def __init__(self, num_ranks: int, disagree: Callable[[RankFailed], None]) -> None:
        """disagree: called if only some ranks have failed."""
        self._num_ranks = num_ranks
        self._disagree = disagree
        self._calls: dict[int, Awaited] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest awaited step, including those of parts."""
        plans = [awaited.plan for awaited in self._calls.values() if awaited.plan is not None]
        return max((plan.total_tokens + plan.num_more_tokens for plan in plans), default=0)

    def add_call(
        self,
        number: int,
        plan: StepPlan | None,
        waits_for: set[int],
        *,
        may_differ: bool = False,
    ) -> asyncio.Future[Any]:
        """Return a future of rank 0's result. plan: None for a job. waits_for: other ranks that
        reply.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = Awaited(future, plan, waits_for, may_differ)
        return future

    def finish_own(self, number: int, result: Any) -> None:
        awaited = self._calls[number]
        awaited.result, awaited.own_done = result, True
        self._settle(number, awaited)

    def finish(self, rank: int, number: int) -> None:
        if (awaited := self._calls.get(number)) is not None:
            awaited.waits_for.discard(rank)
            self._settle(number, awaited)

    def fail(self, rank: int, number: int, error: BaseException) -> bool:
        """Record a failure; return whether the call is still awaited."""
        if (awaited := self._calls.get(number)) is None:
            return False
        awaited.failures[rank] = error
        awaited.waits_for.discard(rank)
        awaited.own_done |= not rank
        self._settle(number, awaited)
        return True

    def fail_all(self, error: Exception) -> None:
        for awaited in self._calls.values():
            set_once(awaited.future, error)
        self._calls.clear()

    async def wait(self) -> None:
        """Wait until all current calls have ended."""
        futures = [awaited.future for awaited in self._calls.values()]
        await asyncio.gather(*futures, return_exceptions=True)

    def _settle(self, number: int, awaited: Awaited) -> None:
        """End the call if all ranks agree."""
        if not awaited.failures or awaited.may_differ:
            if awaited.own_done and not awaited.waits_for:
                del self._calls[number]
                failure = min(awaited.failures.items(), default=(0, awaited.result))[1]
                set_once(awaited.future, failure)
        elif len(awaited.failures) == self._num_ranks:
            del self._calls[number]
            set_once(awaited.future, awaited.failures[0])
        elif not awaited.disputed:
            awaited.disputed = True
            asyncio.get_running_loop().call_later(AGREE_SECONDS, self._report_dispute, number)

    def _report_dispute(self, number: int) -> None:
        if (awaited := self._calls.get(number)) is None:
            return
        rank, error = min(awaited.failures.items())
        reason = str(error) if rank else f"rank 0: {type(error).__name__}: {error}"
        others = ", ".join(str(r) for r in range(self._num_ranks) if r not in awaited.failures)
        self._disagree(RankFailed(f"{reason}; not so on rank {others}"))


def set_once(future: asyncio.Future[Any], value: Any) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)


async def last(done: asyncio.Future[Any]) -> Any:
    """Await a job that goes on on another thread: what it returns at first is a future."""
    return await asyncio.wrap_future(await done)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved; it is reported elsewhere."""
    if not future.cancelled():
        future.exception()
