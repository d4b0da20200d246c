"""Runs the application: engine up, listen, drain on SIGTERM, engine down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import time
from dataclasses import dataclass

from aiohttp import web

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.registry import Plugins
from .app import make_app
from .context import ServerOptions

logger = logging.getLogger("jackfield.server")
SWITCH_INTERVAL = 0.0005
"""Seconds a thread may hold the interpreter while another one wants it: a launch must not wait."""


@dataclass(frozen=True)
class Listen:
    """Where to listen."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None


async def serve(
    config: EngineConfig, plugins: Plugins, listen: Listen, options: ServerOptions
) -> int:
    """Serve until a signal; → exit status: 0 after a clean end, 1 when the engine died."""
    began = time.monotonic()
    sys.setswitchinterval(SWITCH_INTERVAL)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = AsyncEngine(config, plugins=plugins)
    await engine.start()
    runner = web.AppRunner(
        make_app(engine, options), handler_cancellation=True, access_log=None, shutdown_timeout=5
    )
    try:
        await runner.setup()
        site: web.BaseSite
        if listen.uds:
            site = web.UnixSite(runner, listen.uds)
        else:
            site = web.TCPSite(runner, listen.host, listen.port)
        await site.start()
        _freeze()
        where = listen.uds or f"http://{listen.host}:{listen.port}"
        print(
            f"Serving {engine.served_model_names[0]} on {where} ({engine.info.device}, attention: "
            f"{engine.info.attention_backend}, {engine.info.attention_reason}; "
            f"{engine.info.num_blocks} KV blocks), ready in {time.monotonic() - began:.1f} s",
            flush=True,
        )
        dead = asyncio.create_task(_watch(engine))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({dead, stopped}, return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        stopped.cancel()
        if engine.dead_reason is not None:
            logger.error("the engine died: %s", engine.dead_reason)
            return 1
        print("Draining", flush=True)
        if not await engine.drain(options.shutdown_timeout):
            logger.warning("requests were cut off after %.0f s", options.shutdown_timeout)
        return 0
    finally:
        with contextlib.suppress(Exception):
            await runner.cleanup()
        await engine.stop()


async def _watch(engine: AsyncEngine) -> None:
    while engine.dead_reason is None:
        await asyncio.sleep(0.5)


def _freeze() -> None:
    """What lives now lives on: keep the garbage collector off it."""
    gc.collect()
    gc.freeze()
