"""`RemoteCore`: a client of an engine core in another process, over a Unix socket.

This process tokenizes prompts and produces texts: detokenizing, stop strings, log-probabilities as
text. Scheduling, grammars, the model and the engine's counts are in the other process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import prometheus_client as prometheus

from ..config import EngineConfig
from ..engine.async_engine import AsyncEngine
from ..engine.core_client import S
from ..engine.output_processor import RequestTracker, State
from ..engine.plugin_events import PluginEvents
from ..engine.resolve_config import resolve_models
from ..engine.text_processor import TextProcessor
from ..errors import EngineStopped
from ..loading.model_config import ModelConfig
from ..lora_request import AdapterCard, AdapterJob
from ..metrics.merge import families
from ..outputs import EngineStats
from ..protocols.executors import ExecutorInfo
from ..registry import Plugins, load_plugins
from ..request import Request, RequestSpec
from .channel import Channel
from .frames import (
    Close,
    ErrorReply,
    Hello,
    Listening,
    Reply,
    Report,
    ReportRequest,
    Status,
    ToFront,
    Tokens,
    Welcome,
)
from .pending_calls import PendingCalls
from .requests import RemoteRequests


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
        self.remote = RemoteRequests(self.requests, self._channel, self._calls)
        self._stats = EngineStats()

    # ------------------------------------------------------------ start and stop

    async def start(self, texts: TextProcessor, events: PluginEvents) -> None:
        """Connect, and wait until the engine is ready. Raises EngineStopped if it ends first."""
        self.remote.events = events
        loop = asyncio.get_running_loop()
        self._welcome = loop.create_future()
        await loop.create_unix_connection(lambda: self._channel, str(self.path))
        self._calls.send(Hello(self.front, os.getpid()))
        # The tokenizer loads while the engine loads its model. The engine reports errors of the
        # checkpoint, so an error here is raised only after the welcome.
        loading = asyncio.create_task(
            asyncio.to_thread(texts.load_alone, self.config, self.plugins)
        )
        await asyncio.wait([loading])
        welcome = await self._welcome
        loading.result()
        self.config, self.info = welcome.config, welcome.info
        self.model_config = await asyncio.to_thread(
            resolve_models, self.config, self.info, self.plugins
        )

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

    async def check_health(self, timeout: float) -> dict[str, str]:
        """Raise EngineStopped unless the engine's step loop and worker are alive."""
        if not self.requests.healthy:
            raise EngineStopped(self.requests.dead_reason or "the engine is not running")
        try:
            reply = await asyncio.wait_for(self._calls.query("health"), timeout)
        except TimeoutError:
            raise EngineStopped(f"the engine has not answered for {timeout:g} seconds") from None
        return msgspec.msgpack.decode(reply, type=dict[str, str])

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

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Do what an `AdapterJob` says, and return its cards."""
        return await self._calls.ask_adapters(job)

    # ------------------------------------------------------------ requests

    def check_open(self) -> None:
        """Raise unless a request may begin here.

        The engine checks its limits, and the ids of the other front ends.
        """
        self.requests.check_accepting()

    async def add_request(self, spec: RequestSpec, make_state: Callable[[list[Request]], S]) -> S:
        """Send a request, and wait until it is scheduled."""
        self.check_open()
        return await self.remote.add(spec, make_state)

    def abort_request(self, state: State) -> None:
        """End what is left of a request at once, and notify the engine."""
        self.remote.abort(state)

    # ------------------------------------------------------------ received frames

    def _received(self, message: ToFront) -> None:
        match message:
            case Tokens():
                self.remote.take_tokens(message)
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
        self.remote.fail(f"the engine died: {reason}")
        self.closed.set()
