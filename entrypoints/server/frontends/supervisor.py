"""First process of `jackfield serve --api-server-count N`: runs the engine, and starts and restarts
front ends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from ....core.engine.async_engine import AsyncEngine
from ....core.engine.core_client import ServedCore
from ....core.errors import JackfieldError
from ....core.make_core import make_core
from ....core.metrics.stats_log import logging_stats
from ....core.remote.server import EngineServer
from ....core.worker.serving_process import prepare_to_serve
from ...stdout import announce
from ..serve_settings import Settings
from ..server import CLOSE_SECONDS, address, engine_end, first_of, ready_line
from ..signals import stop_signals, unless_stopped
from .launch_spec import LaunchSpec, engine_socket
from .sockets import bound

logger = logging.getLogger("jackfield.fronts")
MAX_RESTARTS = 5
"""Most restarts within RESTART_SECONDS, over all front ends."""
RESTART_SECONDS = 60.0
END_SECONDS = CLOSE_SECONDS + 5.0
"""Seconds for a front end to end after SIGTERM, before it is killed."""


class FrontEndsFailed(JackfieldError):
    """Front ends do not start, or end repeatedly."""


class FrontEnds:
    """N front ends over one engine, restarted while it accepts requests."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: Settings,
        folder: str,
        sockets: list[tuple[socket.socket, ...]],
    ) -> None:
        """sockets: per front end."""
        self.complete = False
        """Whether all have been ready, so that ended ones are restarted."""
        self._engine = engine
        self._settings = settings
        self._folder = folder
        self._sockets = sockets
        self._started = int(time.time())
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._restarts: collections.deque[float] = collections.deque()
        self._ending = False

    async def run(self) -> None:
        """Keep all running. Raises FrontEndsFailed after too many restarts, or a failed start."""
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._sockets)):
                    group.create_task(self._keep(index))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _keep(self, index: int) -> None:
        while True:
            process = await self._start(index)
            status = await process.wait()
            if self._ending or (self.complete and not self._engine.healthy):
                return
            if not self.complete:
                raise FrontEndsFailed(f"front end {index} ended with status {status} at its start")
            now = time.monotonic()
            self._restarts.append(now)
            while now - self._restarts[0] > RESTART_SECONDS:
                self._restarts.popleft()
            if len(self._restarts) > MAX_RESTARTS:
                raise FrontEndsFailed(
                    f"front ends ended {len(self._restarts)} times within {RESTART_SECONDS:g} "
                    f"seconds, the last one with status {status}"
                )
            logger.error("front end %d ended with status %s and is restarted", index, status)

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        numbers = tuple(listener.fileno() for listener in self._sockets[index])
        spec = LaunchSpec(
            self._settings.argv, index, self._folder, numbers, self._started, len(self._sockets)
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "jackfield.entrypoints.server.frontends.process",
            str(index),  # Not read: it shows in a list of processes which one this is.
            stdin=asyncio.subprocess.PIPE,
            pass_fds=numbers,
        )
        self._processes[index] = process
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(spec))
            await process.stdin.drain()
        process.stdin.close()
        return process

    def tell_keys(self) -> None:
        """Make all re-read the key files."""
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGHUP)

    async def end(self) -> None:
        """Wait for all processes to exit, killing the rest after END_SECONDS. After a failed start
        none serves clients yet, and all are killed at once.
        """
        self._ending = True
        exits = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        if exits and self.complete:
            await asyncio.wait(exits, timeout=END_SECONDS)
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await asyncio.gather(*exits)


async def serve_fronts(settings: Settings) -> int:
    """As `serve`, with front-end processes. Raises FrontEndsFailed, StoppedAtStart."""
    start = time.monotonic()
    signals = stop_signals()
    core = make_core(settings.config, settings.plugins)
    engine = AsyncEngine(settings.config, plugins=settings.plugins, core=core)
    with (
        tempfile.TemporaryDirectory(prefix="jackfield-") as folder,  # Readable by this user only.
        bound(settings.listen, settings.fronts) as sockets,
    ):
        fronts = fronted(engine, core, settings, folder, sockets, signals)
        async with (
            fronts as (server, failing),
            logging_stats(engine.stats, settings.options.log_stats_interval),
        ):
            prepare_to_serve()
            uds = settings.listen.uds
            where = uds or address(settings.listen, sockets[0][0].getsockname()[1])
            line = ready_line(engine, where, start)
            announce(f"{line}, {settings.fronts} front ends")
            await first_of(engine_end(engine), signals.get(), failing())
            if engine.dead_reason is not None:
                logger.error("the engine died: %s", engine.dead_reason)
                return 1
            announce("Draining")
            server.refuse_requests()
            drained = first_of(engine.drain(settings.options.shutdown_timeout), signals.get())
            if await drained is not True:
                logger.warning("running requests are cut off")
                await engine.stop()
            return 0


@contextlib.asynccontextmanager
async def fronted(
    engine: AsyncEngine,
    core: ServedCore,
    settings: Settings,
    folder: str,
    sockets: list[tuple[socket.socket, ...]],
    signals: asyncio.Queue[int],
) -> AsyncIterator[tuple[EngineServer, Callable[[], Coroutine[Any, Any, None]]]]:
    """Run an engine and its front ends. Yield the engine's server, and a coroutine function that
    raises FrontEndsFailed. Raises StoppedAtStart at an early signal.
    """
    server = EngineServer(core)
    fronts = FrontEnds(engine, settings, folder, sockets)
    if settings.options.api_key_files:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, fronts.tell_keys)
    async with server.listening(engine_socket(folder)):
        # They load their tokenizers while the engine loads the model.
        watching = asyncio.create_task(fronts.run())

        async def failing() -> None:
            await asyncio.shield(watching)

        async def ready() -> None:
            await engine.start()
            server.started()
            await server.all_listening(len(sockets))

        try:
            await unless_stopped(first_of(ready(), failing()), signals)
            fronts.complete = True
            yield server, failing
        finally:
            server.send_status()
            server.close_fronts()
            await fronts.end()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await engine.stop()
