"""Jobs that all members do alike: their adapters, pauses and weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import msgspec

from ..background_tasks import BackgroundTasks
from ..config import EngineConfig
from ..errors import EngineStopped, InvalidRequest
from ..live.engine_jobs import (
    UPDATE_JOBS,
    BeginUpdate,
    CommitUpdate,
    JoinGroup,
    LiveJob,
    PrepareUpdate,
    ReadFiles,
    RollBack,
)
from ..lora_request import (
    AdapterCard,
    AdapterJob,
    FindAdapter,
    ListAdapters,
    LoadAdapter,
    UnloadAdapter,
    configured_loads,
)
from .member import Member, MemberProcess

logger = logging.getLogger("jackfield.member")


def merged_cards(cards: Iterable[AdapterCard]) -> list[AdapterCard]:
    """Return the cards of several engines as those of one, by name: their requests together."""
    merged: dict[tuple[str, str], AdapterCard] = {}
    for card in cards:
        before = merged.get((card.name, card.owner))
        if before is not None:
            card = msgspec.structs.replace(
                before,
                running=before.running + card.running,
                waiting=before.waiting + card.waiting,
                resident=before.resident or card.resident,
                nbytes=max(before.nbytes, card.nbytes),
            )
        merged[card.name, card.owner] = card
    return [merged[key] for key in sorted(merged)]


class MemberJobs:
    """Lets all members do what a job says, or none; and one that starts again what others did."""

    def __init__(self, serving: Callable[[], list[Member]], config: EngineConfig) -> None:
        """serving: returns the members that serve, at least one."""
        self._serving = serving
        self._adapters: dict[tuple[str, str], LoadAdapter] = {
            ("", job.name): job for job in configured_loads(config.lora_modules)
        }
        """Owner and name → how what has been loaded by name is loaded again."""
        self._adapter_jobs = asyncio.Lock()
        """Held by a job that changes adapters: one at a time."""
        self._coming: tuple[str, str] | None = None
        """Owner and name of a new adapter that some members have, and others not yet."""
        self._tasks = BackgroundTasks()
        """Changes in progress, which their callers do not end: what some members have done, all do,
        and it is known for one that starts again."""
        self._files: ReadFiles | None = None
        """Where the update in progress was read from."""
        self._committed: tuple[ReadFiles | None, str] | None = None
        """Where the weights that serve were read from, and their version; None: as at the start."""

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Let all members do what a job says, or none. Return the cards of what they have
        together."""
        if isinstance(job, FindAdapter):  # All know the same names, and none waits for a load.
            return await self._serving()[0].ask_adapters(job)
        if isinstance(job, ListAdapters):  # Nor does a list.
            replies = await asyncio.gather(*(each.ask_adapters(job) for each in self._serving()))
            cards = merged_cards(chain.from_iterable(replies))
            return [card for card in cards if (card.owner, card.name) != self._coming]
        return await self._tasks.finish(self._change_adapters(job))

    async def _change_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        async with self._adapter_jobs:
            if isinstance(job, LoadAdapter) and (job.owner, job.name) not in self._adapters:
                self._coming = job.owner, job.name
            try:
                return await self._adapters_on_each(job)
            finally:
                self._coming = None

    async def _adapters_on_each(self, job: AdapterJob) -> list[AdapterCard]:
        members = self._serving()
        replies = await asyncio.gather(
            *(member.ask_adapters(job) for member in members), return_exceptions=True
        )
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        if errors and len(errors) < len(members) and isinstance(job, LoadAdapter):
            changed = [m for m, r in zip(members, replies, strict=True) if isinstance(r, list)]
            await self._undo(job, changed)
        if errors:
            raise errors[0]
        if isinstance(job, LoadAdapter):
            self._adapters[job.owner, job.name] = job
        if isinstance(job, UnloadAdapter):
            for card in chain.from_iterable(replies):  # type: ignore[arg-type]
                self._adapters.pop((card.owner, card.name), None)
        return merged_cards(chain.from_iterable(replies))  # type: ignore[arg-type]

    async def _load_adapters(self, process: MemberProcess, attempt: int) -> None:
        """Let a member that starts again load what the others have."""
        async with self._adapter_jobs:
            for job in self._adapters.values() if attempt else ():
                try:
                    await process.calls.ask_adapters(job)
                except InvalidRequest as error:
                    logger.error("%s has no adapter %r: %s", process.name, job.name, error)

    async def _undo(self, job: LoadAdapter, members: list[Member]) -> None:
        """Take back a load that other members have refused."""
        before = self._adapters.get((job.owner, job.name))
        undo: AdapterJob = UnloadAdapter(name=job.name, tenant=job.owner)
        if before is not None:
            undo = msgspec.structs.replace(before, load_inplace=True)
        await asyncio.gather(
            *(member.ask_adapters(undo) for member in members), return_exceptions=True
        )

    # ------------------------------------------------------------ live operation

    async def ask_live(self, job: LiveJob, num_ranks: int) -> dict[str, Any]:
        """Let all members, of so many ranks each, do what a job says; return what they are
        together."""
        return await self._tasks.finish(self._live_together(job, num_ranks))

    async def _live_together(self, job: LiveJob, num_ranks: int) -> dict[str, Any]:
        if isinstance(job, CommitUpdate):
            await self._live_on_each(PrepareUpdate(), num_ranks)  # None commits unless all can.
        answers = await self._live_on_each(job, num_ranks)
        together = dict(answers[0])
        for name in ("num_requests", "num_recomputed", "num_kept", "world_size"):
            if name in together:
                together[name] = sum(answer[name] for answer in answers)
        if "results" in together:
            together["results"] = [result for answer in answers for result in answer["results"]]
        if "is_paused" in together:
            together["is_paused"] = all(answer["is_paused"] for answer in answers)
        if isinstance(job, BeginUpdate):
            self._files = None
            return {"update": ""}  # Members have names of their own, for the one in progress.
        if isinstance(job, ReadFiles):
            self._files = job
        if isinstance(job, CommitUpdate):
            self._committed = (self._files, job.version or together["weights_version"])
        return together

    async def _live_on_each(self, job: LiveJob, num_ranks: int) -> list[dict[str, Any]]:
        """Return all members' answers. If one refuses what belongs to an update, all give it up."""
        members = self._serving()
        jobs: list[LiveJob] = [job] * len(members)
        if isinstance(job, JoinGroup):
            jobs = [
                msgspec.structs.replace(
                    job, rank_offset=job.rank_offset + member.number * num_ranks
                )
                for member in members
            ]
        replies = await asyncio.gather(
            *(member.ask_live(each) for member, each in zip(members, jobs, strict=True)),
            return_exceptions=True,
        )
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        if errors and isinstance(job, UPDATE_JOBS):
            # An update that cannot begin at all members may be in progress at some of them.
            began = [m for m, r in zip(members, replies, strict=True) if isinstance(r, dict)]
            undone = began if isinstance(job, BeginUpdate) else members
            await asyncio.gather(
                *(member.ask_live(RollBack()) for member in undone), return_exceptions=True
            )
        if errors:
            raise errors[0]
        return replies  # type: ignore[return-value]

    async def _load_weights(self, process: MemberProcess) -> None:
        """Let a member that starts again have the weights of the others. Raises EngineStopped if
        they were sent, and cannot be read again."""
        if self._committed is None:
            return
        files, version = self._committed
        if files is None:
            raise EngineStopped(
                f"{process.name} has the weights of its start, and the others version {version!r}, "
                "which was sent to them: send it again after a new start"
            )
        await process.calls.ask_live(BeginUpdate())
        await process.calls.ask_live(files)
        await process.calls.ask_live(CommitUpdate(version=version))

    async def prepare_again(self, process: MemberProcess, attempt: int) -> None:
        """Let a member that starts again have what the others have."""
        if attempt:
            await self._load_weights(process)
        await self._load_adapters(process, attempt)
