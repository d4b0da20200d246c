"""The kit of executors: the one in the box passes it, and planted bugs do not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from mutants import Mutant, mutant_tests, plugin_of, subclass
from two_ranks import TwoRanksKit

from jackfield.core.config import EngineConfig
from jackfield.core.step import Ping, PrepareAhead, Recover, StepResult
from jackfield.plugins.conformance.executors import ExecutorKit
from jackfield.plugins.executors.inprocess import InProcessExecutor


class TestInProcess(ExecutorKit):
    name = "inprocess"


class TestProcesses(ExecutorKit):
    name = "processes"

    @pytest.mark.slow
    def test_experts_move_if_it_says_so(self, tmp_path: Path) -> None:
        """By day, tests/core/worker/test_expert_balance.py lets experts move between ranks."""
        super().test_experts_move_if_it_says_so(tmp_path)


@pytest.mark.slow
class TestTwoRanks(TwoRanksKit):
    """tests/plugins/executors has less of this, and faster."""

    name = "processes"


class Kit(ExecutorKit):
    name = "subject"
    plugin = plugin_of("executor", "subject", InProcessExecutor)


def planted(**changes: Any) -> type:
    return subclass(InProcessExecutor, **changes)


async def one_block_too_many(self: Any) -> Any:
    info = await InProcessExecutor.start(self)
    return msgspec.structs.replace(info, num_blocks=info.num_blocks + 1)


async def start_on_the_loop(self: Any) -> Any:
    from jackfield.core.worker.threads import WorkerThread

    self._thread = WorkerThread(asyncio.get_running_loop())
    return self._worker.start()


def run_at_once(self: Any, plan: Any, in_process: Any) -> Any:
    future = asyncio.get_running_loop().create_future()
    try:
        future.set_result(self._worker.step(plan, in_process).wait())
    except Exception as error:
        future.set_exception(error)
    return future


def one_off(self: Any, plan: Any, in_process: Any) -> Any:
    async def later() -> Any:
        result = await InProcessExecutor.submit(self, plan, in_process)
        tokens = [token + 1 for token in result.token_ids]
        return msgspec.structs.replace(result, token_ids=tokens)

    return asyncio.ensure_future(later())


def every_row_samples(self: Any, plan: Any, in_process: Any) -> Any:
    async def later() -> Any:
        result = await InProcessExecutor.submit(self, plan, in_process)
        counts = [1] * len(plan.slots)
        tokens = [*result.token_ids, *counts][: len(counts)]
        return msgspec.structs.replace(result, counts=counts, token_ids=tokens)

    return asyncio.ensure_future(later())


def skips_what_is_empty(self: Any, plan: Any, in_process: Any) -> Any:
    if plan.slots:
        return InProcessExecutor.submit(self, plan, in_process)
    future = asyncio.get_running_loop().create_future()
    future.set_result(StepResult(plan.step, [], []))
    return future


def swallows(self: Any, plan: Any, in_process: Any) -> Any:
    async def later() -> Any:
        try:
            return await InProcessExecutor.submit(self, plan, in_process)
        except Exception:
            return StepResult(plan.step, [1] * len(plan.slots), [5] * len(plan.slots))

    return asyncio.ensure_future(later())


def doing_nothing_for(kind: type, value: Any = None) -> Any:
    """Replies to jobs of this kind at once, as if all were well."""

    def generate(self: Any, job: Any) -> Any:
        if not isinstance(job, kind):
            return InProcessExecutor.ask(self, job)
        future = asyncio.get_running_loop().create_future()
        future.set_result(value)
        return future

    return generate


def takes_any_job(self: Any, job: Any) -> Any:
    known = isinstance(job, Ping | Recover | PrepareAhead)
    return InProcessExecutor.ask(self, job if known else Ping())


async def drops_the_queue(self: Any) -> None:
    for future in getattr(self, "futures", ()):
        future.cancel()
    await InProcessExecutor.stop(self)


def remembered(self: Any, plan: Any, in_process: Any) -> Any:
    future = InProcessExecutor.submit(self, plan, in_process)
    self.__dict__.setdefault("futures", []).append(future)
    return future


async def stop_once(self: Any) -> None:
    assert self._thread is not None, "stopped twice"
    await InProcessExecutor.stop(self)


async def leaves_a_thread(self: Any) -> None:
    if self._thread is not None:
        threading.Thread(target=threading.Event().wait, daemon=True, name="left over").start()
    await InProcessExecutor.stop(self)


class StopsAll(InProcessExecutor):
    """The workers of all instances end with the first."""

    workers: ClassVar[list[Any]] = []

    async def start(self) -> Any:
        StopsAll.workers.append(self._worker)
        return await super().start()

    async def stop(self) -> None:
        await super().stop()
        for worker in StopsAll.workers:
            worker.runner = None


def silent(self: Any) -> Any:
    async def start() -> Any:
        try:
            return await InProcessExecutor.start(self)
        except Exception as error:
            raise RuntimeError("the worker did not start") from error

    return start()


def failing_at_the_end(self: Any) -> Any:
    failed = self.__dict__.get("failed")
    if failed is not None:
        failed(RuntimeError("stopped"))
    return InProcessExecutor.stop(self)


def remembering(self: Any, callback: Any) -> None:
    self.failed = callback


class BeginsOnce(InProcessExecutor):
    """An engine's start may not be begun again."""

    begun: ClassVar[list[EngineConfig]] = []

    @staticmethod
    def start_ahead(config: EngineConfig) -> None:
        # The same object, not an equal one: each engine makes its own, in whichever test.
        assert all(config is not other for other in BeginsOnce.begun), "begun twice"
        BeginsOnce.begun.append(config)


INFO = "test_what_it_tells_of_itself"
TOKENS = "test_tokens_are_those_of_the_executor_in_the_box"
JOBS = "test_jobs_run_in_order_with_plans"
EMPTY = "test_a_plan_may_have_no_rows"
ORDER, WAITS = "test_plans_run_in_order", "test_submitting_does_not_wait"
WHY = "test_a_start_that_fails_says_why"
FAILS = "test_a_step_that_fails_says_so_and_is_recovered_from"
PING, QUEUED = "test_a_ping_comes_after_what_was_queued", "test_stopping_finishes_what_is_queued"
TWICE = "test_stopping_twice_or_before_the_start_is_harmless"
TWO = "test_two_live_side_by_side"

EXPERTS = "test_experts_move_if_it_says_so"
OPTIONAL = "test_what_is_optional_is_called_as_an_engine_does"

MUTANTS = {
    "fails where it is stopped": Mutant(
        planted(stop=failing_at_the_end, watch_failure=remembering), (OPTIONAL,)
    ),
    "says that it moves experts": Mutant(
        planted(tensor_parallel=True, moves_experts=True), (EXPERTS,)
    ),
    "begins once": Mutant(BeginsOnce, (OPTIONAL,)),
    "one block too many": Mutant(planted(start=one_block_too_many), (INFO,)),
    "starts on the event loop": Mutant(planted(start=start_on_the_loop), (WAITS,)),
    "runs a step on the event loop": Mutant(planted(submit=run_at_once), (WAITS,)),
    "tokens are one off": Mutant(planted(submit=one_off), (TOKENS, PING, QUEUED)),
    "every row samples": Mutant(planted(submit=every_row_samples), (ORDER, TOKENS, PING, QUEUED)),
    "skips plans without rows": Mutant(planted(submit=skips_what_is_empty), (EMPTY,)),
    "a failed step succeeds": Mutant(planted(submit=swallows), (FAILS, PING)),
    "no step after a failed one": Mutant(planted(ask=doing_nothing_for(Recover)), (FAILS,)),
    "answers a ping at once": Mutant(planted(ask=doing_nothing_for(Ping)), (PING,)),
    "takes any job": Mutant(planted(ask=takes_any_job), (JOBS,)),
    "says nothing of what is left": Mutant(planted(ask=doing_nothing_for(PrepareAhead)), (JOBS,)),
    "drops what is queued": Mutant(planted(submit=remembered, stop=drops_the_queue), (QUEUED,)),
    "stops only once": Mutant(planted(stop=stop_once), (TWICE,)),
    "leaves a thread": Mutant(
        planted(stop=leaves_a_thread),
        (INFO, PING, WHY, FAILS, ORDER, QUEUED, TWICE, WAITS, TOKENS, TWO, EMPTY, JOBS, OPTIONAL),
    ),
    "stops its neighbour": Mutant(StopsAll, (TWO,)),
    "says not why it failed": Mutant(planted(start=silent), (WHY,)),
}

TestMutants = mutant_tests(Kit, MUTANTS)
