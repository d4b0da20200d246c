"""`RemoteCore`: a client of an engine core in another process, over a Unix socket.

This process tokenizes prompts and produces texts: detokenizing, stop strings, log-probabilities as
text. Scheduling, grammars, the model and the engine's counts are in the other process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prometheus_client as prometheus

from ..config import EngineConfig
from ..engine.async_engine import AsyncEngine
from ..engine.core_client import S
from ..engine.output_processor import RequestTracker, State
from ..engine.plugin_events import PluginEvents
from ..engine.pooling import PoolingState
from ..engine.request_state import Completion, RequestState
from ..engine.resolve_config import resolve_runner
from ..engine.text_processor import TextProcessor
from ..errors import EngineStopped
from ..loading.model_config import ModelConfig, resolve_model_config
from ..metrics.merge import families
from ..outputs import EngineStats
from ..protocols.executors import ExecutorInfo
from ..registry import Plugins, load_plugins
from ..request import Request, RequestSpec, Update
from .channel import Channel
from .frames import (
    Abort,
    AddRequest,
    Change,
    Close,
    ErrorReply,
    Hello,
    Listening,
    Reply,
    Report,
    ReportRequest,
    Status,
    Stop,
    ToFront,
    Tokens,
    Welcome,
)
from .pending_calls import PendingCalls


def remote_engine(
    config: EngineConfig, path: Path, *, front: int = 0, plugins: Plugins | None = None
) -> tuple[AsyncEngine, RemoteCore]:
    """Return an engine over the socket at `path`, and its core.

    front: this process's number among the front ends.
    """
    if plugins is None:
        plugins = load_plugins(disable=config.disable_plugins)
    core = RemoteCore(config, path, plugins, front=front)
    return AsyncEngine(config, plugins=plugins, core=core), core


class RemoteCore:
    """Runs requests in another process. A `CoreClient`.

    `stats` are at most a second old. Plugins get the event `request_finished` here, and the other
    events in the engine's process.
    """

    in_process = False
    model_config: ModelConfig
    info: ExecutorInfo
    events: PluginEvents

    def __init__(
        self, config: EngineConfig, path: Path, plugins: Plugins, *, front: int = 0
    ) -> None:
        """path: the engine's socket; front: this process's number among the front ends."""
        self.config = config
        self.path = path
        self.plugins = plugins
        self.front = front
        self.requests = RequestTracker()
        self.registry = prometheus.CollectorRegistry()
        """Counts of this process."""
        self.closed = asyncio.Event()
        """Set when the engine reports that nothing more will come, or is lost."""
        self.lost = False
        """Whether the connection has ended other than by `stop`."""
        self._loads: list[Callable[[], int]] = []
        self._channel: Channel[ToFront] = Channel(ToFront, received=self._received, lost=self._lost)
        self._welcome: asyncio.Future[Welcome] | None = None
        self._calls = PendingCalls(self._channel)
        self._open: dict[int, tuple[State, Any]] = {}
        """Number → request and completion, until the completion has ended."""
        self._numbers: dict[str, int] = {}
        """Request id → the number of its first completion."""
        self._stops: dict[int, str] = {}
        """Completions that a stop string has ended here and the engine has not ended yet."""
        self._stats = EngineStats()

    # ------------------------------------------------------------ start and stop

    async def start(self, texts: TextProcessor, events: PluginEvents) -> None:
        """Connect, and wait until the engine is ready. Raises EngineStopped if it ends first."""
        self.events = events
        loop = asyncio.get_running_loop()
        self._welcome = loop.create_future()
        await loop.create_unix_connection(lambda: self._channel, str(self.path))
        self._calls.send(Hello(self.front, os.getpid()))
        # The tokenizer loads while the engine loads its model. The engine reports errors of the
        # checkpoint, so an error here is raised only after the welcome.
        loading = asyncio.create_task(asyncio.to_thread(self._load_texts, texts))
        await asyncio.wait([loading])
        welcome = await self._welcome
        loading.result()
        self.config, self.info = welcome.config, welcome.info
        model_config = await asyncio.to_thread(resolve_model_config, self.config, self.plugins)
        _, self.model_config = await asyncio.to_thread(
            resolve_runner, self.config, self.config, model_config, self.plugins
        )

    def _load_texts(self, texts: TextProcessor) -> None:
        texts.load(self.config, resolve_model_config(self.config, self.plugins))

    def send_listening(self) -> None:
        """Notify the engine that clients can connect."""
        self._calls.send(Listening())

    async def stop(self) -> None:
        """Disconnect from the engine. Safe to call twice."""
        self.requests.accepting = False
        self._channel.lost = None
        self._channel.close()
        self._fail("this process is stopping")

    # ------------------------------------------------------------ questions

    async def check_health(self, timeout: float) -> None:
        """Raise EngineStopped unless the engine's step loop and worker are alive."""
        if not self.requests.healthy:
            raise EngineStopped(self.requests.dead_reason or "the engine is not running")
        try:
            await asyncio.wait_for(self._calls.query("health"), timeout)
        except TimeoutError:
            raise EngineStopped(f"the engine has not answered for {timeout:g} seconds") from None

    async def reset_prefix_cache(self) -> bool:
        """Forget cached blocks. Return False if some are in use."""
        return bool(await self._calls.query("reset_prefix_cache"))

    async def render_metrics(self) -> bytes:
        """Return the metrics of the engine, with those of all its front ends added up."""
        return bytes(await self._calls.query("metrics"))

    def report_load(self, count: Callable[[], int]) -> None:
        """Register `count`, which is called when the engine asks for this process's load."""
        self._loads.append(count)

    async def server_load(self) -> int:
        """Return the number of inference requests that all front ends serve."""
        return int(await self._calls.query("load"))

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine, at most a second old while it works."""
        return self._stats

    # ------------------------------------------------------------ requests

    def check_open(self, request_id: str) -> None:
        """Raise unless a request of this id may begin here.

        The engine checks its limits, and the ids of the other front ends.
        """
        self.requests.check_accepting()
        self.requests.check_free(request_id)

    async def add_request(self, spec: RequestSpec, make_state: Callable[[list[Request]], S]) -> S:
        """Send a request, and wait until it is scheduled."""
        self.check_open(spec.request_id)
        state = make_state(spec.requests())
        # Registered before it is sent: its tokens may come with the engine's reply.
        self.requests.add_state(state)
        number = self._calls.numbers(len(state.requests))
        self._numbers[state.request_id] = number
        for index, completion in enumerate(state.completions):
            self._open[number + index] = (state, completion)
        try:
            await self._calls.call(number, AddRequest(number, spec))
        except asyncio.CancelledError:
            self.abort_request(state)
            raise
        except BaseException:
            self._forget(state)
            raise
        return state

    def abort_request(self, state: State) -> None:
        """End what is left of a request at once, and notify the engine."""
        first = self._numbers.get(state.request_id)
        if first is None or state.finished:
            return
        numbers = range(first, first + len(state.completions))
        self._channel.send(Abort([number for number in numbers if number in self._open]))
        for completion in state.completions:
            completion.set_finished("abort", None)
        self._end(state)

    def _forget(self, state: State) -> None:
        first = self._numbers.pop(state.request_id, None)
        if first is None:
            return
        for number in range(first, first + len(state.completions)):
            self._open.pop(number, None)
            self._stops.pop(number, None)
        self.requests.remove_state(state)

    def _end(self, state: State) -> None:
        """Finish a request whose completions have all ended."""
        self._forget(state)
        state.mark_finished()
        if self.events.wants_requests:
            if isinstance(state, RequestState):
                self.events.request_finished(state.peek_output())
            elif state.pooled.row is not None:
                self.events.request_finished(state.output())
        self.requests.notify(state)

    # ------------------------------------------------------------ received frames

    def _received(self, message: ToFront) -> None:
        match message:
            case Tokens():
                self._take_tokens(message)
            case Reply() | ErrorReply():
                self._calls.settle(message)
            case Status():
                self._stats = message.stats
                if message.dead_reason is not None:
                    self._fail(message.dead_reason)
                if not message.accepting:
                    self.requests.accepting = False
            case ReportRequest():
                counts = families(self.registry)
                load = sum(count() for count in self._loads)
                self._calls.send(Report(message.number, load, counts))
            case Welcome():
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(message)
            case Close():
                self.requests.accepting = False
                self.closed.set()
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_exception(EngineStopped("the engine is stopping"))

    def _take_tokens(self, tokens: Tokens) -> None:
        """Apply a step's tokens, and notify the streams."""
        now = time.monotonic()
        streams = self._open
        for number, token_id in zip(tokens.numbers, tokens.token_ids, strict=True):
            entry = streams.get(number)
            if entry is None or number in self._stops:
                continue  # It has ended here, and the engine is being notified.
            state, completion = entry
            state.timings.last_token = now
            stop = completion.apply_tokens((token_id,))
            if stop is not None:
                self._stop(number, stop)
            self.requests.notify(state)
        for change in tokens.changes:
            entry = streams.get(change.number)
            if entry is None:
                continue
            state, completion = entry
            if isinstance(state, PoolingState):
                self._take_pooled(state, change)
            else:
                self._change(state, completion, change, now)

    def _stop(self, number: int, stop: str) -> None:
        """Make the engine end a completion at a stop string."""
        self._stops[number] = stop
        self._channel.send(Stop(number, stop))

    def _change(
        self, state: RequestState, completion: Completion, change: Change, now: float
    ) -> None:
        number, request = change.number, completion.request
        finished = change.finish_reason is not None
        if change.num_cached_tokens is not None:
            request.num_cached_tokens = change.num_cached_tokens
            request.first_scheduled = change.first_scheduled
            request.num_preemptions = change.num_preemptions
        if finished:
            request.finish_reason = change.finish_reason
            request.stop_reason = change.stop_reason
            request.kv_transfer_params = change.kv_transfer_params
            request.compression_usage = change.compression_usage
            state.error = change.error or state.error
        if change.prompt_logprobs:
            state.add_prompt_logprobs(change.prompt_logprobs)
        stop = self._stops.get(number)
        if change.token_ids and stop is None:
            state.mark_tokens(now)
            stop = completion.apply(
                Update(request, change.token_ids, change.logprobs or None, finished=finished)
            )
            if stop is not None and not finished:
                self._stop(number, stop)
        if finished:
            if stop is not None and change.finish_reason != "error":
                completion.set_finished("stop", stop)
            else:
                completion.set_finished(change.finish_reason or "abort", change.stop_reason)
            del self._open[number]
            self._stops.pop(number, None)
        if state.finished:
            self._end(state)
        else:
            self.requests.notify(state)

    def _take_pooled(self, state: PoolingState, change: Change) -> None:
        request = state.requests[0]
        request.num_cached_tokens = change.num_cached_tokens or 0
        request.first_scheduled = change.first_scheduled
        request.num_preemptions = change.num_preemptions
        state.pooled.row, state.error = change.pooled, change.error
        state.pooled.set_finished(change.finish_reason or "abort")
        self._end(state)

    def _lost(self) -> None:
        self.lost = True
        self._fail("the engine's process has ended")

    def _fail(self, reason: str) -> None:
        """End every request with an error, and accept no more."""
        self.requests.dead_reason = self.requests.dead_reason or reason
        self.requests.accepting = False
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(EngineStopped(reason))
        self._calls.fail(reason)
        for state in list(self.requests.states.values()):
            state.error = state.error or f"the engine died: {reason}"
            for completion in state.completions:
                completion.set_finished("error", None)
            self._end(state)
        self.closed.set()
