"""The engine's sockets: serves front ends from a core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..engine.core_client import HEALTH_SECONDS, ServedCore
from ..engine.pooling import Pooled
from ..engine.request_state import Completion
from ..errors import EngineStopped, InvalidRequest, JackfieldError, RequestFailed
from ..metrics.merge import merged, render
from ..request import Request
from .channel import Channel
from .frames import (
    Abort,
    AdapterQuery,
    AddRequest,
    BadFrame,
    Close,
    ErrorReply,
    Hello,
    Listening,
    LiveQuery,
    Query,
    Reply,
    Report,
    ReportRequest,
    Status,
    Stop,
    ToEngine,
    ToFront,
    Welcome,
)
from .outbox import Forwarded, ForwardedPoolingState, ForwardedState, Outbox

logger = logging.getLogger("jackfield.remote")
STATUS_SECONDS = 1.0
"""Seconds between status updates."""
REPORT_SECONDS = 2.0
"""Seconds for reports; slower front ends are omitted."""


class EngineServer:
    """Accepts front ends from before the core's start until after its end."""

    def __init__(self, core: ServedCore) -> None:
        self.core = core
        self.fronts: set[FrontendConnection] = set()
        self.changed = asyncio.Event()
        """Set when a front end begins to listen, or disconnects."""
        self._started = asyncio.Event()
        self._tickets = 0
        self._reports: dict[int, asyncio.Future[Report]] = {}

    @contextlib.asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Serve a Unix socket in a private folder."""

        def make_channel() -> Channel[ToEngine]:
            return Channel(ToEngine, opened=lambda channel: FrontendConnection(self, channel))

        server = await asyncio.get_running_loop().create_unix_server(make_channel, str(path))
        try:
            async with self.sending_status():
                yield
        finally:
            server.close()
            for front in list(self.fronts):
                front.channel.close()

    @contextlib.asynccontextmanager
    async def sending_status(self) -> AsyncIterator[None]:
        status_task = asyncio.create_task(self._send_status_often())
        try:
            yield
        finally:
            status_task.cancel()
            await asyncio.gather(status_task, return_exceptions=True)

    def started(self) -> None:
        self._started.set()
        for front in self.fronts:
            front.welcome()

    async def all_listening(self, count: int) -> None:
        while sum(front.listening for front in self.fronts) < count:
            self.changed.clear()
            await self.changed.wait()

    def close_fronts(self) -> None:
        for front in self.fronts:
            front.send(Close())

    def send_status(self) -> None:
        if self._started.is_set():
            requests = self.core.requests
            status = Status(requests.healthy, requests.dead_reason, self.core.stats())
            for front in self.fronts:
                front.send_status(status)

    def refuse_requests(self) -> None:
        self.core.requests.accepting = False
        self.send_status()

    async def _send_status_often(self) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            self.send_status()

    async def reports(self) -> list[Report]:
        """Return the reports that arrive in time."""
        waiting: dict[int, asyncio.Future[Report]] = {}
        for front in self.fronts:
            if front.listening and not front.channel.paused:
                self._tickets += 1
                waiting[self._tickets] = asyncio.get_running_loop().create_future()
                self._reports[self._tickets] = waiting[self._tickets]
                front.send(ReportRequest(self._tickets))
        try:
            if waiting:
                await asyncio.wait(waiting.values(), timeout=REPORT_SECONDS)
            return [future.result() for future in waiting.values() if future.done()]
        finally:
            for ticket in waiting:
                del self._reports[ticket]

    def take_report(self, report: Report) -> None:
        future = self._reports.get(report.number)
        if future is not None and not future.done():
            future.set_result(report)

    async def reply_to(self, name: str) -> bytes | bool | int | None:
        """Return a Query's reply. Raises InvalidRequest if unknown."""
        match name:
            case "health":
                return msgspec.msgpack.encode(await self.core.check_health(HEALTH_SECONDS))
            case "metrics":
                reports = [report.families for report in await self.reports()]
                return render(merged([await self.core.metric_families(), *reports]))
            case "families":
                return msgspec.msgpack.encode(await self.core.metric_families())
            case "ping":
                return None
            case "load":
                return sum(report.load for report in await self.reports())
            case "reset_prefix_cache":
                return await self.core.reset_prefix_cache()
            case "compact_kv_cache":
                return await self.core.compact_kv_cache()
            case "start_profile":
                await self.core.start_profile()
                return None
            case "stop_profile":
                return msgspec.msgpack.encode(await self.core.stop_profile())
        raise InvalidRequest(f"unknown query: {name[:64]!r}")

    @property
    def is_started(self) -> bool:
        return self._started.is_set()


class FrontendConnection:
    """The engine's end of a front end's connection, whose requests end with it."""

    def __init__(self, server: EngineServer, channel: Channel[ToEngine]) -> None:
        self.core = server.core
        self.channel = channel
        self.index = -1
        """-1 before its Hello."""
        self.pid = 0
        self.listening = False
        """Whether it accepts clients."""
        self._server = server
        self._outbox = Outbox(channel, self._drop)
        self._sent_status: Status | None = None
        self._last = -1
        """Largest number used."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Number → call without a reply."""
        channel.received = self._first
        channel.lost = self._lost
        channel.ready = self._outbox.flush

    def welcome(self) -> None:
        self.send(Welcome(self.core.config, self.core.info))

    def send(self, message: ToFront) -> None:
        """Send a message that fits in a frame."""
        self.channel.send(message)

    def send_status(self, status: Status) -> None:
        """Send a changed status, unless the front end is slow."""
        if status != self._sent_status and not self.channel.paused:
            self._sent_status = status
            self.send(status)

    def _first(self, message: ToEngine) -> None:
        if not isinstance(message, Hello):
            raise BadFrame("the first frame of a connection must be a hello")
        self.index, self.pid = message.front, message.pid
        self._server.fronts.add(self)
        self.channel.received = self._received
        if self._server.is_started:
            self.welcome()

    def _received(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._run(message.number, self._add_request(message), message.spec.params.n)
            case Query():
                self._run(message.number, self._reply(message))
            case AdapterQuery():
                self._run(message.number, self._ask_adapters(message))
            case LiveQuery():
                self._run(message.number, self._ask_live(message))
            case Abort():
                self._abort(message.numbers)
            case Stop():
                state = self._outbox.open.get(message.number)
                if isinstance(state, ForwardedState):
                    index = message.number - state.number
                    self.core.finish_completion(state, index, message.stop)
            case Report():
                self._server.take_report(message)
            case Listening():
                self.listening = True
                self._server.changed.set()
            case Hello():
                raise BadFrame("a second hello")

    def _run(self, number: int, work: Coroutine[Any, Any, None], count: int = 1) -> None:
        """Serve a call in a task, so that grammars do not block others."""
        if number <= self._last:
            work.close()
            raise BadFrame(f"number {number} after {self._last}")
        self._last = number + count - 1

        async def run() -> None:
            try:
                if not self._server.is_started:
                    raise EngineStopped("the engine has not started")
                await work
            except JackfieldError as error:
                self.send(ErrorReply.from_error(number, error))
            except Exception:
                logger.exception("a request failed")
                failed = RequestFailed("the engine failed on this request")
                self.send(ErrorReply.from_error(number, failed))

        def discard(_: asyncio.Task[None]) -> None:
            self._tasks.pop(number, None)
            work.close()  # Not started if its task was cancelled at once.

        task = self._tasks[number] = asyncio.create_task(run())
        task.add_done_callback(discard)

    async def _add_request(self, message: AddRequest) -> None:
        """Run a validated request: only its id and the engine's room are checked here."""
        number, outbox = message.number, self._outbox

        def make_state(requests: list[Request]) -> Forwarded:
            if message.spec.pooling is not None:
                return ForwardedPoolingState(requests[0], number, outbox)
            return ForwardedState(requests, number, outbox)

        state = await self.core.add_request(message.spec, make_state)
        completions: Sequence[Completion | Pooled] = state.completions
        for index, completion in enumerate(completions):
            if completion.finish_reason is None:  # Of several engines, one may be done already.
                outbox.open[number + index] = state
        self.send(Reply(number))

    async def _reply(self, query: Query) -> None:
        self.send(Reply(query.number, await self._server.reply_to(query.name)))

    async def _ask_adapters(self, query: AdapterQuery) -> None:
        cards = await self.core.ask_adapters(query.job)
        self.send(Reply(query.number, msgspec.msgpack.encode(cards)))

    async def _ask_live(self, query: LiveQuery) -> None:
        answer = await self.core.ask_live(query.job)
        self.send(Reply(query.number, msgspec.msgpack.encode(answer)))

    def _abort(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            task, state = self._tasks.get(number), self._outbox.open.get(number)
            if task is not None:
                task.cancel()
            if state is not None:
                self._drop(state)

    def _drop(self, state: Forwarded) -> None:
        """Abort a request, sending no more of it."""
        state.muted = True
        if not state.finished:
            self.core.abort_request(state)

    def _lost(self) -> None:
        self._server.fronts.discard(self)
        self._server.changed.set()
        self._abort([*self._tasks, *self._outbox.open])
