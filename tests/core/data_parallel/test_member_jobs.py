"""What all members do alike: none waits for another's load, and no change is left half done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jackfield.core.config import EngineConfig
from jackfield.core.data_parallel.member_jobs import MemberJobs
from jackfield.core.live.engine_jobs import CommitUpdate, ReadFiles
from jackfield.core.lora_request import AdapterCard, ListAdapters, LoadAdapter


class Engine:
    """An engine that loads and commits when it may."""

    def __init__(self) -> None:
        self.permission = asyncio.Event()
        self.names: list[str] = []
        self.arrival = asyncio.Event()
        self.commits = 0

    async def ask_adapters(self, job: Any) -> list[AdapterCard]:
        if isinstance(job, LoadAdapter):
            self.arrival.set()
            await self.permission.wait()
            self.names.append(job.name)
        return [AdapterCard(name=each, path="", format="", parent="") for each in self.names]

    async def ask_live(self, job: Any) -> dict[str, Any]:
        if isinstance(job, CommitUpdate):
            self.arrival.set()
            await self.permission.wait()
            self.commits += 1
        return {"weights_version": "one"}


@pytest.fixture
async def engines() -> list[Engine]:
    return [Engine(), Engine()]


@pytest.fixture
async def jobs(engines: list[Any]) -> MemberJobs:
    return MemberJobs(lambda: engines, EngineConfig())


async def names(jobs: MemberJobs) -> list[str]:
    return [card.name for card in await jobs.ask_adapters(ListAdapters())]


async def test_a_list_does_not_wait_for_a_load(jobs: MemberJobs, engines: list[Engine]) -> None:
    loading = asyncio.ensure_future(jobs.ask_adapters(LoadAdapter(name="a", path="/a")))
    engines[0].permission.set()
    await engines[1].arrival.wait()
    while not engines[0].names:
        await asyncio.sleep(0)
    listing = asyncio.ensure_future(names(jobs))
    for _ in range(20):
        await asyncio.sleep(0)
    assert listing.done() and listing.result() == []  # One of two engines has it.
    engines[1].permission.set()
    await loading
    assert await names(jobs) == ["a"]


async def test_a_change_goes_on_without_its_caller(jobs: MemberJobs, engines: list[Engine]) -> None:
    await jobs.ask_live(ReadFiles(path="/new"), 1)
    for work in (
        jobs.ask_adapters(LoadAdapter(name="a", path="/a")),
        jobs.ask_live(CommitUpdate(), 1),
    ):
        task = asyncio.ensure_future(work)
        for engine in engines:
            await engine.arrival.wait()
            engine.arrival.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for engine in engines:
            engine.permission.set()
        while jobs._tasks:
            await asyncio.sleep(0)
        for engine in engines:
            engine.permission.clear()
    assert [engine.names for engine in engines] == [["a"], ["a"]]
    assert [engine.commits for engine in engines] == [1, 1]
    # A member that starts again is to have both.
    assert jobs._adapters.keys() == {("", "a")} and jobs._committed == (
        ReadFiles(path="/new"),
        "one",
    )
