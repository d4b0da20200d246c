"""A burst of requests leaves the engine its turns of the event loop."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from jackfield.entrypoints.http.request_pacing import RequestPacer


async def test_a_burst_goes_through_in_order_a_few_a_turn() -> None:
    pacer, turn, entered = RequestPacer(per_turn=3), 0, []

    async def run_one(number: int) -> None:
        await pacer.enter()
        entered.append((number, turn))

    tasks = [asyncio.create_task(run_one(number)) for number in range(20)]
    while len(entered) < 20:
        turn += 1
        await asyncio.sleep(0)
        assert turn < 40
    await asyncio.gather(*tasks)
    assert [number for number, _ in entered] == list(range(20))
    turns = [turn for _, turn in entered]
    assert max(turns.count(turn) for turn in set(turns)) == 3
    assert all(after - before <= 1 for before, after in pairwise(turns[3:])), "none was wasted"


async def test_a_cancelled_waiter_takes_no_place() -> None:
    pacer, entered = RequestPacer(per_turn=1), []

    async def run_one(number: int) -> None:
        await pacer.enter()
        entered.append(number)

    tasks = [asyncio.create_task(run_one(number)) for number in range(6)]
    await asyncio.sleep(0)
    for number in (1, 2, 3):
        tasks[number].cancel()
    await asyncio.wait(tasks)
    assert entered == [0, 4, 5]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.wait_for(pacer.enter(), 300)


async def test_few_requests_wait_for_nothing() -> None:
    pacer = RequestPacer(per_turn=2)
    for _ in range(5):
        coroutine = pacer.enter()
        try:
            coroutine.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
