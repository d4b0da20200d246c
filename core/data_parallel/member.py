"""A member for the first process: process, connection, restarts."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ..engine.output_processor import RequestTracker, State
from ..engine.plugin_events import PluginEvents
from ..errors import EngineStopped
from ..live.engine_jobs import LiveJob
from ..lora_request import AdapterCard, AdapterJob
from ..outputs import EngineStats
from ..protocols.executors import EngineProcess
from ..remote.channel import Channel
from ..remote.frames import (
    START,
    ErrorReply,
    Hello,
    Reply,
    Status,
    ToFront,
    Tokens,
    Welcome,
)
from ..remote.pending_calls import PendingCalls
from ..remote.processes import describe_end
from ..remote.requests import RemoteRequests
from ..request import RequestSpec
from .restarts import RestartPolicy
from .setup import Setup

logger = logging.getLogger("jackfield.member")
POLL_SECONDS = 0.02
REAP_SECONDS = 2.0
"""Seconds until a process with a closed connection is gone."""
END_SECONDS = 30.0
"""Seconds for a member to end before it is killed."""
KILL_SECONDS = 10.0
"""Seconds for a killed process, which a driver may delay."""
SIGN_SECONDS = 10.0
"""Seconds between liveness checks."""
SILENT_SECONDS = 60.0
"""Silence after which a member is killed and restarted."""


class MemberProcess:
    """One process of a member."""

    def __init__(
        self,
        name: str,
        tracker: RequestTracker,
        events: PluginEvents,
        *,
        launch: Callable[[], Awaitable[EngineProcess]],
        begun: Callable[[State], None],
        ended: Callable[[State], None],
        orphaned: Callable[[MemberProcess, State, RequestSpec], bool],
    ) -> None:
        """name: for messages; launch: starts the process; begun, ended: as of `RemoteRequests`.
        orphaned: called at its death with each request without output; True: it moves elsewhere.
        """
        self.name = name
        self.stats = EngineStats()
        """At most a second old."""
        self.num_lost = 0
        """Requests that ended with it."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        """Why it ended, as a sentence with its name."""
        self._welcome: asyncio.Future[Welcome] = loop.create_future()
        self._channel: Channel[ToFront] = Channel(ToFront, received=self._received, lost=self._lost)
        self.calls = PendingCalls(self._channel)
        self.requests = RemoteRequests(
            tracker, self._channel, self.calls, begun=begun, ended=ended, where=f"{name}: "
        )
        self.requests.events = events
        self._reaping: asyncio.Task[None] | None = None
        self._killed_because: str | None = None
        self._launch = launch
        self._orphaned = orphaned
        self.process: EngineProcess | None = None

    async def launch(self) -> None:
        """Raises without room for it."""
        self.process = await self._launch()

    async def start(self, setup: Setup) -> Welcome:
        """Wait until the engine is ready. Raises its error, or EngineStopped."""
        assert self.process is not None, "launch() comes first"
        await self._channel.attach(self.process.connection)
        self._channel.send(setup)
        self.calls.send(Hello(setup.member, os.getpid()))
        outcomes: list[asyncio.Future[Any]] = [self._welcome, self.ended]
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        if self._welcome.done():
            return self._welcome.result()
        raise EngineStopped(f"{self.ended.result()} while it started")

    async def watch(self) -> None:
        """Kill the process after silence. Runs until cancelled."""
        while True:
            await asyncio.sleep(SIGN_SECONDS)
            try:
                await asyncio.wait_for(self.calls.query("ping"), SILENT_SECONDS)
            except TimeoutError:
                self._killed_because = f"gave no sign of life for {SILENT_SECONDS:g} seconds"
                assert self.process is not None, "it has started"
                self.process.kill()
            except EngineStopped:
                return

    async def close(self, seconds: float) -> None:
        """Ask the process to end, kill it after `seconds`, and await it."""
        self._channel.lost = None
        self._channel.close()
        if self._reaping is not None:
            self._reaping.cancel()
        self._finish(f"{self.name} is stopping", dies=False)
        if (process := self.process) is None:
            return
        await self._wait(process, seconds)
        process.kill()
        await self._wait(process, KILL_SECONDS)
        if process.ending() is None:
            logger.error("%s%s was killed, and is still there", self.name, process.where)
        process.connection.close()
        await process.release()

    async def _wait(self, process: EngineProcess, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while process.ending() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    def _received(self, message: ToFront) -> None:
        match message:
            case Tokens():
                self.requests.take_tokens(message)
            case ErrorReply(number=number) if number == START:
                self._welcome.set_exception(message.error())
            case Reply() | ErrorReply():
                self.calls.settle(message)
            case Status():
                self.stats = message.stats
                if message.dead_reason is not None:
                    self._finish(f"{self.name} died: {message.dead_reason}")
            case Welcome():
                self._welcome.set_result(message)

    def _lost(self) -> None:
        if not self.ended.done():
            self._reaping = asyncio.create_task(self._reap())

    async def _reap(self) -> None:
        assert self.process is not None, "it had a connection"
        await self._wait(self.process, REAP_SECONDS)
        how = self._killed_because or self.process.ending() or describe_end(None)
        self._finish(f"{self.name}{self.process.where} {how}")

    def _finish(self, reason: str, *, dies: bool = True) -> None:
        """End everything that waits for it, once. dies: unexpectedly, so that requests may move."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        self.calls.fail(reason)
        if dies:
            self.requests.hand_over(lambda state, spec: self._orphaned(self, state, spec))
        self.num_lost = self.requests.fail(reason)


class Member:
    """Starts and restarts a member's process."""

    def __init__(
        self,
        number: int,
        start: Callable[[], MemberProcess],
        make_setup: Callable[[int], Setup],
        *,
        fits: Callable[[Welcome], None],
        prepare: Callable[[MemberProcess, int], Awaitable[None]],
        served: Callable[[Member, Welcome], None],
        lost: Callable[[Member], None],
        watched: bool,
        restarts: RestartPolicy,
    ) -> None:
        """make_setup: of a start's number. fits: raises if a restarted engine cannot replace the
        first. prepare: called with each process that fits, and the number of its start, before it
        serves. served, lost: called when it begins and ceases to serve.
        """
        self.number = number
        self.process: MemberProcess | None = None
        """Last process, or None."""
        self.serves = False
        self.trouble = "is starting"
        self.given_up = False
        self.num_starts = 0
        self.first: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._start = start
        self._make_setup = make_setup
        self._fits = fits
        self._prepare = prepare
        self._served = served
        self._lost = lost
        self._watched = watched
        self._restarts = restarts

    async def run(self) -> None:
        """Keep it running until it is given up, or this is cancelled."""
        try:
            while True:
                began = time.monotonic()
                served = await self._begin()
                if served:
                    began = time.monotonic()
                    await self._serve()
                elif self.num_starts == 1:
                    return
                await self._end(END_SECONDS)
                pause = self._restarts.pause(time.monotonic() - began if served else 0.0)
                if pause is None:
                    break
                logger.error("%s; it is started again in %g seconds", self.trouble, pause)
                await asyncio.sleep(pause)
            self.given_up = True
            logger.error("%s; it is not started again", self.trouble)
            self._lost(self)
        finally:
            await self._end(END_SECONDS if self.serves else 0.0)

    async def _begin(self) -> bool:
        """Start a process; return whether it serves."""
        self.process = process = self._start()
        setup = self._make_setup(self.num_starts)
        self.num_starts += 1
        try:
            await process.launch()
            welcome = await process.start(setup)
            self._fits(welcome)
            await self._prepare(process, self.num_starts - 1)
        except Exception as error:
            self.trouble = str(error) if process.ended.done() else f"{process.name}: {error}"
            if not self.first.done():
                self.first.set_exception(error)
            return False
        self.serves = True
        self._served(self, welcome)
        if not self.first.done():
            self.first.set_result(welcome)
        return True

    async def _serve(self) -> None:
        assert self.process is not None
        watching = asyncio.create_task(self.process.watch()) if self._watched else None
        try:
            reason = await asyncio.shield(self.process.ended)
        finally:
            if watching is not None:
                watching.cancel()
        self.serves, self.trouble = False, reason
        self._lost(self)

    async def _end(self, seconds: float) -> None:
        self.serves = False
        process, self.process = self.process, None
        if process is None:
            return
        closing = asyncio.create_task(process.close(seconds))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # It is ending anyway, and nothing of it is to be left.
            raise

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Ask its engine about adapters. Raises EngineStopped, and what the job says."""
        if self.process is None or not self.serves:
            raise EngineStopped(self.trouble)
        return await self.process.calls.ask_adapters(job)

    async def ask_live(self, job: LiveJob) -> dict[str, Any]:
        """Ask its engine. Raises EngineStopped, and what the job says."""
        if self.process is None or not self.serves:
            raise EngineStopped(self.trouble)
        return await self.process.calls.ask_live(job)

    async def query(self, name: str, seconds: float) -> Any:
        """Query its engine. Raises EngineStopped, also on timeout."""
        if self.process is None or not self.serves:
            raise EngineStopped(self.trouble)
        try:
            return await asyncio.wait_for(self.process.calls.query(name), seconds)
        except TimeoutError:
            raise EngineStopped(f"has not answered for {seconds:g} seconds") from None


def total(parts: list[EngineStats]) -> EngineStats:
    """Add up several engines' stats."""
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in msgspec.structs.asdict(part).items():
            if isinstance(value, dict):
                counts = sums.setdefault(name, {})
                for key, count in value.items():
                    counts[key] = counts.get(key, 0) + count
            else:
                sums[name] = sums.get(name, 0) + value
    usage = sums.get("kv_blocks_used", 0) / max(1, sums.get("kv_blocks_total", 0))
    return EngineStats(**{**sums, "kv_cache_usage": usage})
