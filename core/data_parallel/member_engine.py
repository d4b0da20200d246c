"""A member's engine, serving one connection."""

from __future__ import annotations

import asyncio
import logging
import socket

from ..engine.async_engine import AsyncEngine
from ..engine.core import EngineCore
from ..errors import JackfieldError, LoadError
from ..registry import load_plugins
from ..remote.channel import Channel
from ..remote.frames import START, ErrorReply, ToEngine
from ..remote.server import EngineServer, FrontendConnection
from ..worker.serving_process import prepare_to_serve
from .setup import Setup

logger = logging.getLogger("jackfield.member")
DEATH_SECONDS = 0.1
"""Seconds between checks of the engine."""


async def serve(setup: Setup, connection: socket.socket) -> int:
    """Serve until the connection or the engine ends; return the exit status."""
    lost = asyncio.Event()
    channel: Channel[ToEngine] = Channel(ToEngine, lost=lost.set)
    try:
        plugins = load_plugins(disable=setup.config.disable_plugins, only=setup.plugins)
        core = EngineCore(setup.config, plugins, setup.member)
        engine = AsyncEngine(setup.config, plugins=plugins, core=core)
    except JackfieldError as error:
        await channel.attach(connection)
        return _refuse(channel, error)
    server = EngineServer(core)

    def end_front() -> None:
        front_lost()
        lost.set()

    FrontendConnection(server, channel)
    front_lost, channel.lost = channel.lost or lost.set, end_front
    await channel.attach(connection)
    starting = asyncio.ensure_future(engine.start())
    leaving = asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait([starting, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 1  # No one waits for it any more.
        if (failure := starting.exception()) is not None:
            return _refuse(channel, failure)
        prepare_to_serve()
        async with server.sending_status():
            server.started()
            while engine.dead_reason is None and not leaving.done():
                await asyncio.wait([leaving], timeout=DEATH_SECONDS)
            if engine.dead_reason is None:
                await engine.stop()
                return 0
            server.send_status()
            channel.close()
            await engine.stop()
            return 1
    finally:
        leaving.cancel()


def _refuse(channel: Channel[ToEngine], error: BaseException) -> int:
    """Report why the engine failed; return the exit status."""
    if not isinstance(error, JackfieldError):
        logger.error("the start failed", exc_info=error)
        error = LoadError(f"the start failed: {type(error).__name__}: {error}")
    channel.send(ErrorReply.from_error(START, error))
    channel.close()
    return 1
