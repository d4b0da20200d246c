"""`RemoteCore`: a client of an engine core in another process, over a Unix socket.

Texts (tokenizing, detokenizing, stop strings) are handled here; the engine is in the other process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from ..live.engine_jobs import LiveJob
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
    """Return an engine over the socket, and its core.

    front: index of this front end.
    """
    if plugins is None:
        plugins = load_plugins(disable=config.disable_plugins)
    core = RemoteCore(config, path, plugins, front=front)
    return AsyncEngine(config, plugins=plugins, core=core), core


class RemoteCore:
    """Runs requests in another process. A `CoreClient`.

    Plugins get `request_finished` here, other events in the engine's process.
    """

    in_process = False
    model_config: ModelConfig
    info: ExecutorInfo

    def __init__(
        self, config: EngineConfig, path: Path, plugins: Plugins, *, front: int = 0
    ) -> None:
        """path: the engine's socket; front: index of this front end."""
        self.config = config
        self.path = path
        self.plugins = plugins
        self.front = front
        self.requests = RequestTracker()
        self.registry = prometheus.CollectorRegistry()
        self.closed = asyncio.Event()
        """Set when the engine closes or is lost."""
        self.lost = False
        """Whether the connection ended other than by `stop`."""
        self._loads: list[Callable[[], int]] = []
        self._channel: Channel[ToFront] = Channel(ToFront, received=self._received, lost=self._lost)
        self._welcome: asyncio.Future[Welcome] | None = None
        self._calls = PendingCalls(self._channel)
        self.remote = RemoteRequests(self.requests, self._channel, self._calls)
        self._stats = EngineStats()

    # ------------------------------------------------------------ start and stop

    async def start(self, texts: TextProcessor, events: PluginEvents) -> None:
        """Connect, and wait for the engine. Raises EngineStopped."""
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
        self._calls.send(Listening())

    async def stop(self) -> None:
        self.requests.accepting = False
        self._channel.lost = None
        self._channel.close()
        self._fail("this process is stopping")

    # ------------------------------------------------------------ questions

    async def check_health(self, timeout: float) -> dict[str, str]:
        if not self.requests.healthy:
            raise EngineStopped(self.requests.dead_reason or "the engine is not running")
        try:
            reply = await asyncio.wait_for(self._calls.query("health"), timeout)
        except TimeoutError:
            raise EngineStopped(f"the engine has not answered for {timeout:g} seconds") from None
        return msgspec.msgpack.decode(reply, type=dict[str, str])

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._calls.query("reset_prefix_cache"))

    async def compact_kv_cache(self) -> int:
        return int(await self._calls.query("compact_kv_cache"))

    async def start_profile(self) -> None:
        await self._calls.query("start_profile")

    async def stop_profile(self) -> list[str]:
        reply = await self._calls.query("stop_profile")
        return msgspec.msgpack.decode(reply, type=list[str])

    async def render_metrics(self) -> bytes:
        """Return the metrics of engine and front ends, added up."""
        return bytes(await self._calls.query("metrics"))

    def report_load(self, count: Callable[[], int]) -> None:
        self._loads.append(count)

    async def server_load(self) -> int:
        return int(await self._calls.query("load"))

    def stats(self) -> EngineStats:
        """Return a snapshot, at most a second old."""
        return self._stats

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Do what an `AdapterJob` says, and return its cards."""
        return await self._calls.ask_adapters(job)

    async def ask_live(self, job: LiveJob) -> dict[str, Any]:
        """Do what a `LiveJob` says, and return its answer."""
        return await self._calls.ask_live(job)

    # ------------------------------------------------------------ requests

    def check_open(self) -> None:
        """As the protocol; the engine checks its limits, and other front ends' ids."""
        self.requests.check_accepting()

    async def add_request(self, spec: RequestSpec, make_state: Callable[[list[Request]], S]) -> S:
        self.check_open()
        return await self.remote.add(spec, make_state)

    def abort_request(self, state: State) -> None:
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
        self.requests.dead_reason = self.requests.dead_reason or reason
        self.requests.accepting = False
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(EngineStopped(reason))
        self._calls.fail(reason)
        self.remote.fail(f"the engine died: {reason}")
        self.closed.set()
