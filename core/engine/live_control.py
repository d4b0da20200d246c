"""Serves `LiveJob`s: pauses, and weight updates as transactions.

An update is staged by the ranks while requests run. Its commit brings the engine to rest, lets all
ranks check that they have a whole model, and only then lets them copy it. Until then an error, a
rollback or the end of its lease leaves the old weights, which serve on.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec

from ..errors import (
    ConfigError,
    Conflict,
    EngineStopped,
    InvalidRequest,
    JackfieldError,
    LoadError,
    NotFound,
    OutOfMemory,
    RequestFailed,
    shown,
)
from ..live.engine_jobs import (
    FIRST_VERSION,
    TAGS,
    AskLive,
    BeginUpdate,
    CallWorkers,
    CommitUpdate,
    JoinGroup,
    LeaveGroup,
    LiveJob,
    NameWeights,
    OpenTensors,
    Pause,
    PrepareUpdate,
    PutTensors,
    ReadFiles,
    ReceiveTensors,
    ReportMemoryUse,
    ResetPrefixCache,
    Resume,
    RollBack,
    Sleep,
    WakeUp,
    check_lease,
    check_mode,
    check_tags,
    check_version,
)
from ..live.worker_jobs import (
    ApplyWeights,
    BeginWeights,
    CallPart,
    CheckRelease,
    DropWeights,
    FinishWeights,
    JoinSenders,
    LeaveSenders,
    OpenWeights,
    PutWeights,
    ReadWeights,
    ReceiveWeights,
    ReleaseMemory,
    ReportMemory,
    RestoreMemory,
    TensorPart,
    WeightCount,
)
from ..protocols.executors import Executor
from ..scheduling.parts.kv_transfer import KVTransfer
from ..scheduling.scheduler import Scheduler
from ..step import WorkerJob
from .quiesce import Lease, Quiesce
from .sleeping import SleepState

logger = logging.getLogger("jackfield.engine")
Answer = dict[str, Any]


class LiveControl:
    """What changes an engine that serves. For the event loop only."""

    def __init__(
        self,
        source: ReadFiles,
        quiesce: Quiesce,
        scheduler: Scheduler,
        executor: Executor,
        *,
        num_ranks: int,
        recorded: bool,
        die: Callable[[Exception], None],
    ) -> None:
        """source: what reads the weights of the start. recorded: steps are recorded. die: ends the
        engine, whose ranks may have different weights."""
        self.quiesce = quiesce
        self._sleep = SleepState(source)
        self.version = FIRST_VERSION
        """Version of the weights that serve."""
        self._scheduler, self._executor = scheduler, executor
        self._num_ranks, self._recorded, self._die = num_ranks, recorded, die
        self._num_updates = 0
        self._update: str | None = None
        """Name of the update in progress."""
        self._files: ReadFiles | None = None
        """What has read the update in progress; None: it is sent."""
        self._prepared: WeightCount | None = None
        """Set once the update in progress is known to be whole."""
        self._announced: dict[str, tuple[TensorPart, ...]] = {}
        """Group → what it sent the last time."""
        self._lease = Lease(self._lease_ended)
        self._one = asyncio.Lock()
        """Calls about updates, one at a time."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: set[asyncio.Future[Answer]] = set()
        """Jobs in progress, which outlive their callers."""
        self._serve: Mapping[type, Callable[[Any], Awaitable[Answer]]] = {
            Pause: self._pause,
            Resume: self._resume,
            AskLive: self._ask,
            ResetPrefixCache: self._reset_prefix_cache,
            BeginUpdate: self._begin,
            ReadFiles: self._read,
            PutTensors: self._put,
            ReceiveTensors: self._receive,
            OpenTensors: self._open,
            JoinGroup: self._join,
            LeaveGroup: self._leave,
            PrepareUpdate: self._prepare,
            CommitUpdate: self._commit,
            RollBack: self._roll_back,
            NameWeights: self._name,
            Sleep: self._fall_asleep,
            WakeUp: self._wake_up,
            ReportMemoryUse: self._report_memory,
            CallWorkers: self._call,
        }

    async def do(self, job: LiveJob) -> Answer:
        """Do a job, also if its caller goes away. Raises what it says."""
        task = asyncio.ensure_future(self._serve[type(job)](job))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the leases."""
        self.quiesce.lease.stop()
        self._lease.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ pauses

    async def _pause(self, job: Pause) -> Answer:
        check_mode(job.mode)
        check_lease(job.lease)
        self._sleep.check_awake("paused otherwise")
        if not await self.quiesce.pause(job):
            raise Conflict("the pause was ended, or another one began, before the engine was idle")
        return await self._ask(AskLive())

    async def _resume(self, _: Resume) -> Answer:
        self._sleep.check_awake("resumed")
        self.quiesce.resume()
        return await self._ask(AskLive())

    async def _ask(self, _: AskLive) -> Answer:
        return {
            "is_paused": self.quiesce.is_paused,
            "mode": self.quiesce.mode,
            "lease": self.quiesce.lease.left,
            "weights_version": self.version,
            "updating": self._update is not None,
            "num_requests": self._scheduler.num_running + self._scheduler.num_waiting,
            "world_size": self._num_ranks,
            "is_sleeping": bool(self._sleep.asleep),
            "asleep": sorted(self._sleep.asleep),
        }

    async def _reset_prefix_cache(self, job: ResetPrefixCache) -> Answer:
        if self._sleep.began:
            return {"success": True}  # The sleep has forgotten them.
        if job.reset_running_requests:
            async with self.quiesce.at_rest():
                self._scheduler.restart_running()
                return {"success": self._scheduler.reset_prefix_cache()}
        return {"success": self._scheduler.reset_prefix_cache()}

    # ------------------------------------------------------------ updates

    async def _begin(self, job: BeginUpdate) -> Answer:
        check_lease(job.lease)
        if self._recorded:
            raise InvalidRequest(
                "record_steps: a recording is replayed with the weights of the start, so they "
                "cannot be updated"
            )
        if "weights" in self._sleep.asleep:
            raise Conflict("the weights are asleep: wake them first (tags: weights)")
        if self._update is not None:
            raise Conflict("a weight update is in progress: commit it or roll it back first")
        name = self._update = uuid.uuid4().hex
        self._lease.begin(job.lease)
        async with self._one:
            await self._stage(BeginWeights())
        return {"update": name}

    async def _read(self, job: ReadFiles) -> Answer:
        answer = await self._of_update(job.update, ReadWeights(job.path, job.load_format))
        self._files = job
        return answer

    async def _put(self, job: PutTensors) -> Answer:
        return await self._of_update(job.update, PutWeights(job.parts, job.data))

    async def _receive(self, job: ReceiveTensors) -> Answer:
        parts = job.parts or self._announced.get(job.group, ())
        answer = await self._of_update(job.update, ReceiveWeights(job.group, parts))
        self._announced[job.group] = parts
        return answer

    async def _open(self, job: OpenTensors) -> Answer:
        return await self._of_update(job.update, OpenWeights(job.buckets))

    async def _of_update(self, name: str, job: WorkerJob) -> Answer:
        async with self._one:
            self._check(name)
            await self._stage(job)
        return {}

    async def _join(self, job: JoinGroup) -> Answer:
        await self._answer(
            JoinSenders(
                job.group, job.host, job.port, job.rank_offset, job.world_size, job.backend,
                job.timeout, job.packed_bytes, job.rendezvous, job.unique_id,
            )
        )  # fmt: skip
        return {"world_size": self._num_ranks}

    async def _leave(self, job: LeaveGroup) -> Answer:
        await self._answer(LeaveSenders(job.group))
        self._announced.pop(job.group, None)
        return {}

    async def _prepare(self, job: PrepareUpdate) -> Answer:
        async with self._one:
            self._check(job.update)
            async with self.quiesce.at_rest():
                await self._finish()
        return {}

    async def _finish(self) -> WeightCount:
        """Let all ranks check the update, once."""
        if self._prepared is None:
            self._prepared = cast(WeightCount, await self._stage(FinishWeights()))
        return self._prepared

    async def _commit(self, job: CommitUpdate) -> Answer:
        version = str(self._num_updates + 1) if job.version is None else job.version
        check_version(version)
        recompute = not self.quiesce.keeps_caches if job.recompute is None else job.recompute
        if self._scheduler.part(KVTransfer) is not None:
            if job.recompute is False:
                raise InvalidRequest(
                    "recompute: with a KV connector, requests cannot go on with caches of the old "
                    "weights",
                    param="recompute",
                )
            recompute = True
        async with self._one:
            self._check(job.update)
            self._lease.renew()
            async with self.quiesce.at_rest():
                count = await self._finish()
                await self._apply()
                num_live = self._scheduler.num_running
                if recompute:
                    self._scheduler.restart_running()
                self._num_updates += 1
                # A name that a caller gives twice stands for other weights the second time.
                own = "" if job.version is not None else uuid.uuid4().hex
                self._scheduler.change_weights(version, f"{self._num_updates}:{version}:{own}")
                self.version = version
            self._sleep.take_weights(self._files)
            self._forget()
        logger.info("weights: version %s, %.1f MB a rank", shown(version), count.nbytes / 1e6)
        return {
            "weights_version": version,
            "num_tensors": count.num_tensors,
            "nbytes": count.nbytes,
            "num_recomputed": num_live if recompute else 0,
            "num_kept": 0 if recompute else num_live,
        }

    async def _apply(self) -> None:
        """Let all ranks copy the weights. If one of them cannot, the engine ends: it would have
        half a model."""
        try:
            await self._executor.ask(ApplyWeights())
        except Exception as error:
            self._die(error)
            raise EngineStopped(f"new weights were taken in part: {error}") from error

    async def _roll_back(self, job: RollBack) -> Answer:
        async with self._one:
            self._check(job.update)
            await self._drop()
        return {}

    async def _name(self, job: NameWeights) -> Answer:
        check_version(job.version)
        async with self._one, self.quiesce.at_rest():
            self._scheduler.name_weights(job.version)
            self.version = job.version
        return {"weights_version": self.version}

    # ------------------------------------------------------------ sleep

    async def _fall_asleep(self, job: Sleep) -> Answer:
        check_mode(job.mode)
        check_tags(job.tags)
        if job.level not in (1, 2):
            raise InvalidRequest(f"level: must be 1 or 2, got {job.level}", param="level")
        self._sleep.check_awake("put to sleep again")
        if self._update is not None:
            raise Conflict("a weight update is in progress: commit it or roll it back first")
        keep = job.level == 1
        async with self._one:
            await self._answer(CheckRelease(job.tags, keep))
            was_paused = self.quiesce.mode is not None
            if not await self.quiesce.pause(Pause(mode=job.mode, lease=None)):
                raise Conflict("the pause for the sleep was ended before the engine was idle")
            async with self.quiesce.at_rest():
                self._scheduler.restart_running()
                if not self._scheduler.reset_prefix_cache():
                    if not was_paused:
                        self.quiesce.resume()
                    raise Conflict("a KV connector moves blocks of the cache; try again later")
                self._sleep.begin(job.tags, stays_paused=was_paused, keeps=keep)
                freed = await self._answer(ReleaseMemory(job.tags, keep))
        return await self._with_memory({"freed_bytes": freed})

    async def _wake_up(self, job: WakeUp) -> Answer:
        check_tags(job.tags)
        state = self._sleep
        async with self._one:
            tags = tuple(tag for tag in TAGS if tag in state.asleep and tag in job.tags)
            if set(tags) == state.asleep:
                state.check_source()
            await self._restore("weights", tags)
            reads = state.lacks_weights and state.asleep <= set(tags)
        if reads:
            # Before there is a cache, which takes all memory that is left.
            await self._read_again()
        async with self._one:
            await self._restore("kv_cache", tags)
        if not state.asleep and state.began:
            state.began = False
            if not state.stays_paused:
                self.quiesce.resume()
        return await self._with_memory({})

    async def _restore(self, tag: str, tags: tuple[str, ...]) -> None:
        if tag in tags and tag in self._sleep.asleep:
            self._sleep.lacks_weights |= await self._answer(RestoreMemory((tag,)))
            self._sleep.asleep.discard(tag)

    async def _read_again(self) -> None:
        """Read the weights that serve from where they came from."""
        version = self.version
        name = (await self._begin(BeginUpdate()))["update"]
        assert self._sleep.source is not None, "`check_source` refuses others"
        await self._read(msgspec.structs.replace(self._sleep.source, update=name))
        await self._commit(CommitUpdate(update=name, version=version))

    async def _call(self, job: CallWorkers) -> Answer:
        async with self.quiesce.at_rest():
            try:
                result = await self._answer(CallPart(job.method, job.args, job.kwargs))
            except JackfieldError:
                raise
            except Exception as error:
                raise RequestFailed(f"{job.method}: {type(error).__name__}: {error}") from error
        return {"results": [result]}

    async def _report_memory(self, _: ReportMemoryUse) -> Answer:
        memory = await self._answer(ReportMemory())
        return {"memory": [msgspec.to_builtins(each) for each in memory]}

    async def _with_memory(self, answer: Answer) -> Answer:
        state = await self._ask(AskLive())
        return {**state, **answer, **await self._report_memory(ReportMemoryUse())}

    # ------------------------------------------------------------ what all need

    def _check(self, name: str) -> None:
        """Raise NotFound unless an update is in progress."""
        if self._update is None or name not in ("", self._update):
            raise NotFound(
                "update: it is not in progress: it was committed, rolled back, or given up after "
                "an error or at the end of its lease; begin another one",
                param="update",
            )

    async def _stage(self, job: WorkerJob) -> Any:
        """Let all ranks do what belongs to the update; an error gives it up."""
        self._lease.renew()
        try:
            return await self._answer(job)
        except BaseException:
            await self._drop()
            raise
        finally:
            self._lease.renew()

    async def _answer(self, job: WorkerJob) -> Any:
        try:
            return await self._executor.ask(job)
        except NotImplementedError:
            raise InvalidRequest("this executor takes no other weights than at its start") from None
        except (ConfigError, LoadError) as error:
            raise InvalidRequest(
                f"the update is given up, and the old weights serve on: {error.message}",
                param=error.param,
            ) from error
        except OutOfMemory as error:
            raise OutOfMemory(
                "the update is given up, and the old weights serve on: while it is staged, it "
                f"takes as much memory as the model: {error.message}"
            ) from error

    async def _drop(self) -> None:
        self._forget()
        try:
            await self._executor.ask(DropWeights())
        except Exception as error:
            logger.warning("a weight update was given up, and its memory not freed: %s", error)

    def _forget(self) -> None:
        self._update = self._prepared = self._files = None
        self._lease.stop()

    def _lease_ended(self) -> None:
        logger.warning("the lease of a weight update has ended: it is given up")
        name = self._update

        async def give_up() -> None:
            async with self._one:
                if self._update == name:
                    await self._drop()

        task = asyncio.get_running_loop().create_task(give_up())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
