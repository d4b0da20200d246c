"""Several ranks: rank 0 in this process, the others in processes of this host, and of others.

Imports nothing large, as `spawn`. Rank 0 decides: plans and jobs are encoded once for all other
ranks, which run them in the same order; their results are dropped. If ranks disagree on an outcome,
the engine ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec

from ...core.config import EngineConfig
from ...core.errors import RankFailed
from ...core.protocols.executors import Executor, ExecutorInfo, RankState
from ...core.registry import Plugins
from ...core.remote.frames import encode
from ...core.step import LASTING, InProcess, Ping, StepPlan, StepResult, WorkerJob
from ...core.worker.threads import WorkerThread
from .agreement import check_alike, remoteness
from .awaited import AGREE_SECONDS, AwaitedCalls, last, retrieve, set_once
from .followers import FollowerConnection, FollowerProcess
from .hosts.leader import OtherHosts
from .leader_end import END_SECONDS, dump_stacks, end_thread
from .messages import (
    Detach,
    Done,
    End,
    Failed,
    HasReport,
    Job,
    Joining,
    PlanRows,
    Ready,
    Setup,
    ToLeader,
    Transferred,
)
from .progress import Progress, StallDetector
from .spawn import start_ahead
from .transfers import RankTransfers

if TYPE_CHECKING:
    from ...core.loading.model_config import ModelConfig
    from .rank import RankWorker

logger = logging.getLogger("jackfield.worker")
TICK_SECONDS = 0.5
STOP_SECONDS = 60.0
"""Seconds for rank 0 to finish and free its device."""
ABORT_SECONDS = 1.0
"""Seconds after a failure for rank 0's calls to other ranks to end."""
STACK_SECONDS = 0.2
"""Seconds for ranks to write their stacks before they are killed."""
START_TICKS = 120
"""Ticks without a sign of life of a starting rank: loading libraries hold the interpreter."""


class Place(NamedTuple):
    host: str
    """Address of this host, reachable from all ranks."""
    device: int
    """Number of rank 0's device there."""


class ProcessesExecutor(Executor):
    """Runs plans on all ranks. All but the worker is for the event loop only."""

    tensor_parallel = pipeline_parallel = data_parallel = moves_experts = True
    joins_engines = joins_hosts = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, plugins: Plugins) -> None:
        self.config = config
        self.model_config = model_config
        self.plugins = plugins
        self.size = config.num_ranks
        self.followers: list[FollowerConnection] = []
        """Ranks from 1."""
        self.failure: Exception | None = None
        """Why no plans are accepted."""
        self.num_encoded = 0
        """Number of frames encoded (each is sent to all other ranks)."""
        self._thread: WorkerThread | None = None
        self._joined: RankWorker | None = None
        self._other_hosts: OtherHosts | None = None
        self._progress = Progress.create()
        self._infos: list[ExecutorInfo] = []
        """By rank; [] until all ranks have started."""
        self._rows = PlanRows()
        self._number = 0
        self._awaited = AwaitedCalls(self.size, disagree=self._fail)
        self._starting: dict[int, asyncio.Future[ExecutorInfo]] = {}
        self._joining: dict[int, asyncio.Future[None]] = {}
        self._stopping = False
        self._watch: asyncio.Task[None] | None = None
        self._failed: Callable[[Exception], None] = _ignore_failure
        self._transfers: RankTransfers | None = None
        """Set if there is a KV connector."""
        self._transfer_news: Callable[[], None] = _ignore
        """Called on the event loop when a step would report transfers."""

    @staticmethod
    def start_ahead(config: EngineConfig) -> None:
        start_ahead(config.num_ranks // config.nnodes - 1)

    @staticmethod
    def run_host(config: EngineConfig, node_rank: int) -> int:
        from .hosts.headless import run_headless

        return run_headless(config, node_rank)

    @staticmethod
    def initialize_device(config: EngineConfig, plugins: Plugins) -> None:
        from ...core.worker.start.device_init import initialize_device

        initialize_device(config, plugins)

    def ranks(self) -> list[RankState]:
        """Empty before the start and after the end."""
        if not self._infos or self._thread is None or self.failure is not None:
            return []
        hosts = [socket.gethostname(), *(follower.host for follower in self.followers)]
        progress = [self._progress, *(follower.progress for follower in self.followers)]
        return [
            RankState(rank, host, own.read()["finished"], info.weight_bytes, info.kv_cache_bytes)
            for rank, (host, own, info) in enumerate(zip(hosts, progress, self._infos, strict=True))
        ]

    def watch_failure(self, callback: Callable[[Exception], None]) -> None:
        self._failed = callback

    def watch_transfers(self, callback: Callable[[], None]) -> None:
        """Includes the other ranks' worker halves."""
        self._transfer_news = callback
        self._transfers = RankTransfers(self.size, callback, self._detach_connector)

    # ------------------------------------------------------------ start

    async def start(self) -> ExecutorInfo:
        """Start all ranks at once. Raises the first rank's error."""
        from ...core.parallel.join import listen

        loop = asyncio.get_running_loop()
        on_time = self.config.device != "cpu"
        thread = self._thread = WorkerThread(loop, on_time=on_time)
        self._starting = {rank: loop.create_future() for rank in range(1, self.size)}
        self._joining = {rank: loop.create_future() for rank in self._starting}
        own: asyncio.Future[ExecutorInfo] = loop.create_future()
        try:
            host, device = await self._start_others()
            listener = listen(host)
            address = listener.getsockname()[:2]
            for follower in self.followers:
                setup = Setup(
                    config=self.config,
                    rank=follower.rank,
                    local_rank=follower.local_rank,
                    address=address,
                    plugins=self.plugins.outside,
                    log_level=_follower_log_level(),
                )
                follower.send(encode(setup))
            self._watch = asyncio.create_task(self._watch_ranks(), name="jackfield-ranks")

            def start() -> ExecutorInfo:
                from .rank import RankWorker

                self._joined = RankWorker.join(
                    self.config,
                    self.model_config,
                    self.plugins,
                    0,
                    device,
                    address,
                    self._progress,
                    listener,
                )
                self._joined.worker.transfer_news = has_report
                return self._joined.worker.start()

            def has_report() -> None:
                # From the connector's threads, perhaps after the loop's end.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._transfer_news)

            await self._all_joining()
            own = thread.call(start)
            await self._all_started(own)
            info = own.result()
            for rank, future in self._starting.items():
                check_alike(self._name(rank), future.result(), info)
            self._infos = [info, *(future.result() for future in self._starting.values())]
        except BaseException as error:
            self._fail(error if isinstance(error, Exception) else RankFailed("not started"))
            raise
        finally:
            own.add_done_callback(retrieve)
            for future in self._starting.values():
                future.add_done_callback(retrieve)
        return msgspec.structs.replace(info, num_ranks=self.size)

    async def _start_others(self) -> Place:
        """Start the other ranks, as `followers`: each waits for its Setup. Return where rank 0
        is.
        """
        if self.config.nnodes > 1:
            self._other_hosts = OtherHosts(self.config)
        for rank in range(1, self.size // self.config.nnodes):
            self.followers.append(FollowerProcess(rank, received=self._receive, lost=self._lose))
        if self._other_hosts is None:
            return Place("127.0.0.1", 0)
        if self.config.device == "cuda" and self.config.collectives == "auto":
            # Each rank would choose by what it sees on its own host.
            self.config = msgspec.structs.replace(self.config, collectives="nccl")
        async for follower in self._other_hosts.followers(self._receive, self._lose):
            self.followers.append(follower)
        return Place(self.config.master_addr, 0)

    async def _end_others(self) -> None:
        """End what `_start_others` has started, perhaps partly."""
        await asyncio.gather(*(follower.close(END_SECONDS) for follower in self.followers))
        if self._other_hosts is not None:
            await self._other_hosts.close()

    def _name(self, rank: int) -> str:
        """Return a rank's name in messages."""
        return f"rank {rank}{self.followers[rank - 1].where}"

    async def _all_joining(self) -> None:
        """Wait until every other rank is about to join. Raises a failed one's error, or RankFailed
        for one that hangs, which rank 0 would wait for.
        """
        seconds = self.config.distributed_timeout_seconds
        deadline = time.monotonic() + seconds
        for rank, start in self._starting.items():
            waits: list[asyncio.Future[Any]] = [start, self._joining[rank]]
            left = max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
            if not done:
                raise RankFailed(
                    f"{self._name(rank)} of {self.size} has not begun to join the others in "
                    f"{seconds:g} seconds (distributed_timeout_seconds)"
                )

    async def _all_started(self, own: asyncio.Future[ExecutorInfo]) -> None:
        """Raise the cause if a rank does not start: other ranks may only report its loss."""
        starts = [own, *self._starting.values()]
        done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
        if not any(future.exception() for future in done):
            return
        done, _ = await asyncio.wait(starts, timeout=AGREE_SECONDS)
        errors = [error for future in starts if future in done and (error := future.exception())]
        raise min(errors, key=remoteness)

    # ------------------------------------------------------------ steps and jobs

    def submit(self, plan: StepPlan, in_process: InProcess) -> asyncio.Future[StepResult]:
        """Queue a step on all ranks. Raises RankFailed after one was lost."""
        thread, number = self._next()
        if self.followers:
            self._send_frame(self._rows.encode_step(number, plan))

        def launch() -> Any:
            assert self._joined is not None
            self._progress.start(number)
            return self._joined.worker.step(plan, in_process)

        return self._await(number, thread.step(launch), plan)

    def ask(self, job: WorkerJob) -> asyncio.Future[Any]:
        """Queue a job on all ranks; done once all have replied, with rank 0's result."""
        if not isinstance(job, get_args(WorkerJob)):
            refused = asyncio.get_running_loop().create_future()
            name = type(job).__name__
            refused.set_exception(NotImplementedError(f"the worker does no {name}"))
            return refused
        thread, number = self._next()
        self._send(Job(number, job))
        if isinstance(job, Ping):
            return self._await(number, thread.step(_Nothing))

        def run() -> Any:
            assert self._joined is not None
            self._progress.start(number)
            return self._joined.run_job(job)

        done = thread.call(run)
        if not isinstance(job, LASTING):
            return self._await(number, done)
        done.add_done_callback(lambda _: self._progress.finish(number))
        return self._await(number, asyncio.ensure_future(last(done)), may_differ=True)

    def _next(self) -> tuple[WorkerThread, int]:
        if self.failure is not None:
            raise self.failure
        assert self._thread is not None, "start() must be called first"
        self._number += 1
        return self._thread, self._number

    def _send(self, message: Job | Detach | End) -> None:
        if self.followers:
            self._send_frame(encode(message))

    def _send_frame(self, frame: bytes) -> None:
        self.num_encoded += 1
        for follower in self.followers:
            follower.send(frame)

    def _await(
        self,
        number: int,
        own: asyncio.Future[Any],
        plan: StepPlan | None = None,
        *,
        may_differ: bool = False,
    ) -> asyncio.Future[Any]:
        """plan: None for a job, to which other ranks reply."""
        if not self.followers:
            return own
        waits_for = {follower.rank for follower in self.followers} if plan is None else set()
        future = self._awaited.add_call(number, plan, waits_for, may_differ=may_differ)
        own.add_done_callback(lambda done: self._finish_own(number, done))
        return future

    def _finish_own(self, number: int, own: asyncio.Future[Any]) -> None:
        error = None if own.cancelled() else own.exception()
        self._progress.finish(number)
        if number not in self._awaited:
            return  # The engine has failed meanwhile.
        if error is not None:
            self._awaited.fail(0, number, error)
            return
        result = own.result()
        if self._transfers is not None and isinstance(result, StepResult):
            result = self._transfers.into(result)
        self._awaited.finish_own(number, result)

    def _detach_connector(self, failure: str) -> None:
        """Close all ranks' worker halves, as one has raised."""
        thread, joined = self._thread, self._joined
        if self.failure is None and thread is not None and joined is not None:
            self._send(Detach(failure))
            thread.call(lambda: joined.detach_connector(failure)).add_done_callback(retrieve)

    def _receive(self, rank: int, message: ToLeader) -> None:
        if isinstance(message, Joining):
            set_once(self._joining[rank], None)
        elif isinstance(message, Ready):
            self._starting[rank].set_result(message.info)
        elif isinstance(message, Failed):
            error = message.error(self._name(rank))
            if message.number == 0:
                self._starting[rank].set_exception(error)
            elif not self._awaited.fail(rank, message.number, error):
                self._fail(RankFailed(f"{error}; the other ranks have done step {message.number}"))
        elif isinstance(message, HasReport):
            self._transfer_news()
        elif isinstance(message, Transferred):
            assert self._transfers is not None, "only a KV connector reports transfers"
            self._transfers.take(rank, message.report, message.detached)
        elif isinstance(message, Done):
            self._awaited.finish(rank, message.number)

    # ------------------------------------------------------------ failure and end

    def _lose(self, rank: int, ending: str) -> None:
        if self._stopping:
            return
        where = self.followers[rank - 1].where
        error = RankFailed(f"rank {rank} of {self.size}{self._stage_of(rank)}{where} {ending}")
        if not self._starting[rank].done():
            self._starting[rank].set_exception(error)
        else:
            self._fail(error)

    def _stage_of(self, rank: int) -> str:
        """Return a rank's stage for messages, if there are several."""
        stages = self.config.pipeline_parallel_size
        stage = stages - 1 - rank // self.config.tensor_parallel_size
        return "" if stages == 1 else f" (stage {stage} of {stages})"

    async def _watch_ranks(self) -> None:
        """Detect ranks that hang."""
        seconds = self.config.rank_timeout
        ticks = max(1, round(seconds / TICK_SECONDS))
        ranks = [self._progress, *(follower.progress for follower in self.followers)]
        detector = StallDetector(ranks, max(ticks, START_TICKS))
        started = False
        while seconds and self.followers and self.failure is None:
            await asyncio.sleep(TICK_SECONDS)
            if not started and all(future.done() for future in self._starting.values()):
                started, detector = True, StallDetector(ranks, ticks)
            if self._thread is not None:
                self._progress.beat(self._thread.launch_thread)
            stall = detector.tick(bool(self._awaited), self._awaited.most_tokens)
            if stall is None:
                continue
            for dump in (dump_stacks, *(each.dump_stacks for each in self.followers)):
                with contextlib.suppress(Exception):  # The engine ends, stacks or not.
                    dump()
            await asyncio.sleep(STACK_SECONDS)
            places = [self._name(each.rank) for each in self.followers if each.where]
            hosts = f" ({', '.join(places)})" if places else ""
            duration = stall.ticks * TICK_SECONDS
            self._fail(RankFailed(f"{stall.reason} for {duration:g} seconds{hosts}"))

    def _fail(self, error: Exception) -> None:
        """End all other ranks, and everything awaited."""
        if self.failure is not None:
            return
        self.failure = error
        for follower in self.followers:
            follower.kill()
        for future in self._starting.values():
            set_once(future, error)
        self._awaited.fail_all(error)
        self._failed(error)

    async def stop(self) -> None:
        """Finish queued work on all ranks, and end their processes."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        await self._awaited.wait()
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.failure is None:
            self._send(End())
        ended = thread.call(self._stop_worker)
        if not self.followers:
            await ended
            await thread.close()
        else:
            seconds = STOP_SECONDS if self.failure is None else ABORT_SECONDS
            await end_thread(thread, ended, self._joined, seconds)
        await self._end_others()
        if self._joined is None:
            self._progress.close()

    def _stop_worker(self) -> None:
        if self._joined is not None:
            self._joined.stop()
            self._joined = None


class _Nothing:
    def wait(self) -> None:
        return None


def _ignore_failure(error: Exception) -> None:
    """Do nothing: default before a listener is set."""


def _ignore() -> None:
    """Do nothing: default before a listener is set."""


def _follower_log_level() -> int:
    """Return the log level of other ranks, which mostly repeat rank 0."""
    level = logger.getEffectiveLevel()
    return level if level <= logging.DEBUG else max(level, logging.WARNING)
