"""Runs the application: start the engine, listen, drain on SIGTERM, stop the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.metrics.stats_log import logging_stats
from ...core.registry import Plugins
from ...core.worker.serving_process import prepare_to_serve
from ..http.auth.api_keys import KeyRing
from ..http.auth.tenants import TENANCY
from ..http.descriptors import raise_descriptors, watching_descriptors
from ..http.options import ServerOptions
from ..http.request_log import access, lines_of
from ..http.runner import Runner
from ..http.tls import refreshing
from ..stdout import announce
from .app import make_app
from .listen import Listen
from .signals import stop_signals, unless_stopped

logger = logging.getLogger("jackfield.server")
http_logger = logging.getLogger("jackfield.http")
DEAD = object()
BACKLOG = 2048
"""Connections to be accepted; beyond, clients retry after a second."""
CLOSE_SECONDS = 5.0
"""Seconds for unfinished responses at the server's end."""


def not_a_clients_fault(record: logging.LogRecord) -> bool:
    """Log filter: a port scan, without HTTP, is one line without traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
        return True
    logger.info("refused what is not HTTP: %s", " ".join(str(error).split()))
    return False


http_logger.addFilter(not_a_clients_fault)


@contextlib.asynccontextmanager
async def listening(
    engine: AsyncEngine, listen: Listen, options: ServerOptions | None = None
) -> AsyncIterator[str]:
    """Serve a started engine; yield the address, as a URL or a socket's path.

    A client's disconnect cancels its handler, which aborts its request.
    """
    options = options or ServerOptions()
    logs: dict[str, Any] = {"access_log": None}
    if (lines := lines_of(options.access_log, options.access_log_except)) is not None:
        logs = {"access_log": access, "access_log_class": lines}
    raise_descriptors()
    context = listen.tls.context() if listen.tls is not None else None
    app = make_app(engine, options, None if listen.uds else listen.host)
    runner = Runner(
        app,
        options.connections,
        tls=context,
        shutdown_timeout=CLOSE_SECONDS,
        logger=http_logger,
        **logs,
    )
    try:
        await runner.setup()
        sites: list[web.BaseSite]
        if listen.sockets:
            sites = [_BoundSite(runner, listener) for listener in listen.sockets]
        elif listen.uds:
            sites = [web.UnixSite(runner, listen.uds, backlog=BACKLOG)]
        else:
            sites = [web.TCPSite(runner, listen.host, listen.port, backlog=BACKLOG)]
        for site in sites:
            await site.start()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(watching_descriptors())
            if options.api_key_files:
                stack.enter_context(_reading_again(app[TENANCY].keys))
            if listen.tls is not None and context is not None and listen.tls.refresh:
                await stack.enter_async_context(refreshing(listen.tls, context))
            yield listen.uds or address(listen, runner.addresses[0][1])
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def _reading_again(keys: KeyRing) -> Iterator[None]:
    """Re-read the key files on SIGHUP (main thread only)."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGHUP, keys.reload)
    except (RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def serve(
    config: EngineConfig, plugins: Plugins, listen: Listen, options: ServerOptions
) -> int:
    """Serve until a signal; return 0 after a clean end, 1 if the engine died.

    The first signal drains: running requests finish within `shutdown_timeout`. A second one aborts
    them. Raises StoppedAtStart before the engine is up.
    """
    start = time.monotonic()
    signals = stop_signals()
    engine = AsyncEngine(config, plugins=plugins)
    await unless_stopped(engine.start(), signals)
    try:
        async with (
            listening(engine, listen, options) as where,
            logging_stats(engine.stats, options.log_stats_interval),
        ):
            prepare_to_serve()
            announce(ready_line(engine, where, start))
            if await first_of(engine_end(engine), signals.get()) is DEAD:
                logger.error("the engine died: %s", engine.dead_reason)
                return 1
            announce("Draining")
            drained = first_of(engine.drain(options.shutdown_timeout), signals.get())
            if await drained is not True:
                logger.warning("running requests are cut off")
                await engine.stop()
            return 0
    finally:
        await engine.stop()


async def first_of(*waits: Coroutine[Any, Any, Any]) -> Any:
    """Return the first finished coroutine's result; cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ready_line(engine: AsyncEngine, where: str, start: float) -> str:
    """Return the line printed when clients can connect. began: start by `time.monotonic`."""
    info, num_members = engine.info, engine.config.data_parallel_size
    members = f"{num_members} engines, each on " if num_members > 1 else ""
    named = (
        ("calls", engine.config.tool_call_parser),
        ("reasoning", engine.config.reasoning_parser),
    )
    parsers = "".join(f"; {what}: {name}" for what, name in named if name is not None)
    return (
        f"Serving {engine.served_model_names[0]} on {where} ({members}{info.where}, "
        f"attention: {info.attention_backend}, {info.attention_reason}; "
        f"{info.num_blocks} KV blocks{parsers}), ready in {time.monotonic() - start:.1f} s"
    )


async def engine_end(engine: AsyncEngine) -> object:
    while engine.dead_reason is None:
        await asyncio.sleep(0.5)
    return DEAD


def address(listen: Listen, port: int) -> str:
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{'http' if listen.tls is None else 'https'}://{host}:{port}"


class _BoundSite(web.BaseSite):
    """A site on a bound socket, TCP or Unix."""

    def __init__(self, runner: web.AppRunner, bound: socket.socket) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._bound = bound

    @property
    def name(self) -> str:
        return str(self._bound.getsockname())

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        assert self._runner.server is not None
        unix = self._bound.family == socket.AF_UNIX
        create: Any = loop.create_unix_server if unix else loop.create_server
        self._server = await create(self._runner.server, sock=self._bound, backlog=self._backlog)
