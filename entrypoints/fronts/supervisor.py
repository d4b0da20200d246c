"""The first process of `jackfield serve --api-server-count N`: the engine, and a watch over N front
ends, which it starts and restarts."""

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

from ...core.errors import JackfieldError
from ...core.remote.server import EngineServer, ForwardingEngine
from ..cli.serve_settings import Settings
from ..openai.server import (
    CLOSE_SECONDS,
    SWITCH_INTERVAL,
    address,
    death,
    first_of,
    freeze,
    ready_line,
)
from .order import Order, engine_socket
from .sockets import bound

logger = logging.getLogger("jackfield.fronts")
MAX_RESTARTS = 5
"""In RESTART_SECONDS, over all front ends: one that cannot live is not started forever."""
RESTART_SECONDS = 60.0
END_SECONDS = CLOSE_SECONDS + 5.0
"""For a front end to end when it was told to; then it is killed."""


class FrontEndsFailed(JackfieldError):
    """Front ends do not start, or keep ending."""


class FrontEnds:
    """N processes over one engine, each restarted when it ends while the engine takes requests."""

    def __init__(
        self,
        engine: ForwardingEngine,
        settings: Settings,
        folder: str,
        sockets: list[tuple[socket.socket, ...]],
    ) -> None:
        """sockets: those of each."""
        self.complete = False
        """Whether all of them have been ready: one that ends is restarted from then on."""
        self._engine = engine
        self._settings = settings
        self._folder = folder
        self._sockets = sockets
        self._started = int(time.time())
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._restarts: collections.deque[float] = collections.deque()
        self._ending = False

    async def run(self) -> None:
        """Keep all of them running. Raises FrontEndsFailed when that is of no use."""
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
        numbers = tuple(one.fileno() for one in self._sockets[index])
        order = Order(
            self._settings.argv, index, self._folder, numbers, self._started, len(self._sockets)
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "jackfield.entrypoints.fronts.process",
            stdin=asyncio.subprocess.PIPE,
            pass_fds=numbers,
        )
        self._processes[index] = process
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(order))
            await process.stdin.drain()
        process.stdin.close()
        return process

    def tell_keys(self) -> None:
        """Have all of them read the files with keys again."""
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGHUP)

    async def end(self) -> None:
        """Wait for all to end, who were told; those that do not are killed. None of them answers
        clients yet when the start has failed."""
        self._ending = True
        waiting = [asyncio.ensure_future(one.wait()) for one in self._processes.values()]
        if waiting and self.complete:
            await asyncio.wait(waiting, timeout=END_SECONDS)
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await asyncio.gather(*waiting)


async def serve_fronts(settings: Settings) -> int:
    """As `serve`, with front ends in processes of their own. Raises FrontEndsFailed."""
    began = time.monotonic()
    sys.setswitchinterval(SWITCH_INTERVAL)
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, None)
    engine = ForwardingEngine(settings.config, plugins=settings.plugins)
    with (
        tempfile.TemporaryDirectory(prefix="jackfield-") as folder,  # Nobody else may look into it.
        bound(settings.listen, settings.fronts) as sockets,
    ):
        async with fronted(engine, settings, folder, sockets) as (server, failing):
            freeze()
            uds = settings.listen.uds
            where = uds or address(settings.listen, sockets[0][0].getsockname()[1])
            line = ready_line(engine, where, began)
            print(f"{line}, {settings.fronts} front ends", flush=True)
            await first_of(death(engine), signals.get(), failing())
            if engine.dead_reason is not None:
                logger.error("the engine died: %s", engine.dead_reason)
                return 1
            print("Draining", flush=True)
            engine.refuse()
            server.tell_status()
            drained = first_of(engine.drain(settings.options.shutdown_timeout), signals.get())
            if not await drained:
                logger.warning("running requests are cut off")
                await engine.stop()
            return 0


@contextlib.asynccontextmanager
async def fronted(
    engine: ForwardingEngine,
    settings: Settings,
    folder: str,
    sockets: list[tuple[socket.socket, ...]],
) -> AsyncIterator[tuple[EngineServer, Callable[[], Coroutine[Any, Any, None]]]]:
    """Start an engine and its front ends, and end them. → the engine's server, and what to wait for
    that raises FrontEndsFailed."""
    server = EngineServer(engine)
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
            await first_of(ready(), failing())
            fronts.complete = True
            yield server, failing
        finally:
            server.tell_status()
            server.close_fronts()
            await fronts.end()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await engine.stop()
