"""The engine's end: it serves requests of front ends (`ForwardingEngine`) and their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from pathlib import Path
from typing import Any

import msgspec

from ..engine.async_engine import AsyncEngine
from ..engine.pooling import PreparedPrompt
from ..errors import EngineStopped, InvalidRequest, JackfieldError, RequestFailed
from ..observe.merge import families, merged, render
from ..pooling import PoolingParams
from .channel import Channel
from .frames import (
    Abort,
    Answer,
    Ask,
    BadFrame,
    Close,
    Encode,
    Generate,
    GrammarWish,
    Hello,
    Listening,
    Refused,
    Report,
    Status,
    Stop,
    ToEngine,
    ToFront,
    WantReport,
    Welcome,
)
from .outbox import Forwarded, ForwardedPoolingState, ForwardedState, Outbox

logger = logging.getLogger("jackfield.remote")
STATUS_SECONDS = 1.0
"""Between two looks at whether front ends are to be told how the engine is."""
REPORT_SECONDS = 2.0
"""For all front ends to tell what they count; one that takes longer is left out."""


class ForwardingEngine(AsyncEngine):
    """An engine that also takes requests whose text is made elsewhere."""

    async def forward(self, asked: Generate, outbox: Outbox) -> ForwardedState:
        """Admit a front end's request. Raises as `generate` does: nothing is taken on trust."""
        wish = asked.grammar or GrammarWish(chat=False)
        grammar = await self._grammars.prepare(
            asked.params, chat=wish.chat, template_arguments=wish.template_arguments
        )
        bad_words = await self._bad_words(asked.params) if asked.params.bad_words else ()
        request_id = self._check_open(asked.request_id)
        self._check_generates()
        requests = self._admission.requests(
            request_id,
            asked.prompt_token_ids,
            asked.params,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            grammar=grammar,
            bad_words=bad_words,
        )
        state = ForwardedState(request_id, requests, requests[0].params, asked.number, outbox)
        self._enter(state)
        return state

    async def forward_pooling(self, asked: Encode, outbox: Outbox) -> ForwardedPoolingState:
        """Admit a front end's pooling request. Raises as `encode` does."""
        admission = self._pooling_admission
        if admission is None:
            raise InvalidRequest(self._wrong_kind("encode"), param="model")
        request_id = self._check_open(asked.request_id)
        admission.check(asked.prompt_token_ids)
        request = admission.request(
            request_id,
            PreparedPrompt(None, asked.prompt_token_ids, asked.token_type_ids),
            admission.pooling.completed(_as_asked(asked.params)),
            priority=asked.priority,
            cache_salt=asked.cache_salt,
        )
        state = ForwardedPoolingState(request, asked.number, outbox)
        self._enter(state)
        return state

    def refuse(self) -> None:
        """Take no new requests, as `drain` does first."""
        self._accepting = False

    def drop(self, state: Forwarded) -> None:
        """Its front end does not want it any more."""
        state.muted = True
        if not state.finished:
            self._abort(state)

    def stop_one(self, state: ForwardedState, index: int, stop: str) -> None:
        """A front end found a stop string in one of the completions."""
        completion = state.completions[index]
        if completion.finish_reason is None:
            request_id = state.requests[index].request_id
            self._scheduler.finish(request_id, "stop", stop)
            completion.finish("stop", stop)
            self._publisher.ended(state, request_id)
            self._steps.wake()

    def _serve(self) -> None:
        super()._serve()
        # The front ends call the listeners of requests: they have the texts.
        self._publisher.finished = None


def _as_asked(params: PoolingParams) -> PoolingParams:
    """Without what was filled in and has no meaning for the task, to be checked as any request."""
    embeds = params.task in ("embed", "token_embed")
    return msgspec.structs.replace(params, **{"activation" if embeds else "normalize": None})


class EngineServer:
    """Takes connections of front ends, from before the engine has started until after its end."""

    def __init__(self, engine: ForwardingEngine) -> None:
        self.engine = engine
        self.fronts: set[Front] = set()
        self.changed = asyncio.Event()
        """Set when a front end begins to listen, or is gone."""
        self._started = asyncio.Event()
        self._tickets = 0
        self._reports: dict[int, asyncio.Future[Report]] = {}

    @contextlib.asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Serve a Unix socket, in a folder that is nobody else's."""

        def made() -> Channel[ToEngine]:
            return Channel(ToEngine, opened=lambda channel: Front(self, channel))

        server = await asyncio.get_running_loop().create_unix_server(made, str(path))
        telling = asyncio.create_task(self._tell_status())
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            server.close()
            for front in list(self.fronts):
                front.channel.close()

    def started(self) -> None:
        """The engine has started: front ends that wait are welcomed."""
        self._started.set()
        for front in self.fronts:
            front.welcome()

    async def all_listening(self, count: int) -> None:
        """Wait until so many front ends take connections."""
        while sum(front.listening for front in self.fronts) < count:
            self.changed.clear()
            await self.changed.wait()

    def close_fronts(self) -> None:
        """Tell them that nothing more will come."""
        for front in self.fronts:
            front.send(Close())

    def tell_status(self) -> None:
        """How the engine is, to all front ends."""
        engine = self.engine
        if self._started.is_set():
            status = Status(engine.healthy, engine.dead_reason, engine.stats())
            for front in self.fronts:
                front.tell(status)

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            self.tell_status()

    async def reports(self) -> list[Report]:
        """What all front ends count, of those that answer in time."""
        waiting: dict[int, asyncio.Future[Report]] = {}
        for front in self.fronts:
            if front.listening and not front.channel.paused:
                self._tickets += 1
                waiting[self._tickets] = asyncio.get_running_loop().create_future()
                self._reports[self._tickets] = waiting[self._tickets]
                front.send(WantReport(self._tickets))
        try:
            if waiting:
                await asyncio.wait(waiting.values(), timeout=REPORT_SECONDS)
            return [future.result() for future in waiting.values() if future.done()]
        finally:
            for ticket in waiting:
                del self._reports[ticket]

    def take_report(self, report: Report) -> None:
        """One of those that `reports` waits for."""
        future = self._reports.get(report.number)
        if future is not None and not future.done():
            future.set_result(report)

    async def answer(self, what: str) -> bytes | bool | int | None:
        """To an Ask. Raises InvalidRequest for a question that nobody knows."""
        match what:
            case "health":
                await self.engine.check_health()
                return None
            case "metrics":
                reports = [report.families for report in await self.reports()]
                await self.engine.render_metrics()  # Counts as they stand.
                return render(merged([families(self.engine.metrics.registry), *reports]))
            case "load":
                return sum(report.load for report in await self.reports())
            case "reset_prefix_cache":
                return await self.engine.reset_prefix_cache()
        raise InvalidRequest(f"an engine does not know what {what[:64]!r} is")

    @property
    def is_started(self) -> bool:
        return self._started.is_set()


class Front:
    """One front end, as the engine sees it. When its connection ends, so do its requests."""

    def __init__(self, server: EngineServer, channel: Channel[ToEngine]) -> None:
        self.engine = server.engine
        self.channel = channel
        self.index = -1
        """Its number; -1 before it has told."""
        self.pid = 0
        """Its process."""
        self.listening = False
        """Whether it takes connections of clients."""
        self._server = server
        self._outbox = Outbox(channel, self.engine.drop)
        self._told: Status | None = None
        self._last = -1
        """The largest number that it has given to anything."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """What has not been answered yet."""
        channel.received = self._first
        channel.lost = self._lost
        channel.ready = self._outbox.flush

    def welcome(self) -> None:
        """The engine is ready."""
        self.send(Welcome(self.engine.config, self.engine.info))

    def send(self, message: ToFront) -> None:
        """Messages that always fit."""
        self.channel.send(message)

    def tell(self, status: Status) -> None:
        """How the engine is, if that is news and it reads what it is told."""
        if status != self._told and not self.channel.paused:
            self._told = status
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
            case Generate():
                self._run(message.number, self._generate(message), message.params.n)
            case Encode():
                self._run(message.number, self._encode(message))
            case Ask():
                self._run(message.number, self._answer(message))
            case Abort():
                self._abort(message.numbers)
            case Stop():
                state = self._outbox.open.get(message.number)
                if isinstance(state, ForwardedState):
                    self.engine.stop_one(state, message.number - state.number, message.stop)
            case Report():
                self._server.take_report(message)
            case Listening():
                self.listening = True
                self._server.changed.set()
            case Hello():
                raise BadFrame("a second hello")

    def _run(self, number: int, work: Coroutine[Any, Any, None], count: int = 1) -> None:
        """Answer in a task: a grammar takes its time, and no request waits for another's."""
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
                self.send(Refused.because(number, error))
            except Exception:
                logger.exception("a request failed")
                failed = RequestFailed("the engine failed on this request")
                self.send(Refused.because(number, failed))

        def done(_: asyncio.Task[None]) -> None:
            self._tasks.pop(number, None)
            work.close()  # It has not begun, if its task was cancelled at once.

        task = self._tasks[number] = asyncio.create_task(run())
        task.add_done_callback(done)

    async def _generate(self, asked: Generate) -> None:
        state = await self.engine.forward(asked, self._outbox)
        for index in range(len(state.requests)):
            self._outbox.open[asked.number + index] = state
        self.send(Answer(asked.number))

    async def _encode(self, asked: Encode) -> None:
        state = await self.engine.forward_pooling(asked, self._outbox)
        self._outbox.open[asked.number] = state
        self.send(Answer(asked.number))

    async def _answer(self, asked: Ask) -> None:
        self.send(Answer(asked.number, await self._server.answer(asked.what)))

    def _abort(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            task, state = self._tasks.get(number), self._outbox.open.get(number)
            if task is not None:
                task.cancel()
            if state is not None:
                self.engine.drop(state)

    def _lost(self) -> None:
        """The front end has ended, or its connection was ended: nobody waits for its requests."""
        self._server.fronts.discard(self)
        self._server.changed.set()
        self._abort([*self._tasks, *self._outbox.open])
