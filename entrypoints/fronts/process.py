"""A front-end process: HTTP, tokenizer, templates, parsers; the engine is another process.

Run by the first process as `python -m jackfield.entrypoints.fronts.process`, with an `Order` on
standard input. It ends when its engine does, and with 0 only when it was told to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys

import msgspec

from ...core.errors import EngineStopped, JackfieldError
from ...core.remote.client import RemoteEngine
from ..cli.options import fail
from ..cli.serve import run_on_loop
from ..cli.serve_settings import Settings, settings
from ..openai.server import first_of, freeze, listening
from .order import Order, engine_socket, keeper_socket, usage_file

logger = logging.getLogger("jackfield.fronts")


def main() -> int:
    """→ exit status"""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Until there are keys to read again.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The first process gets it, too, and tells us.
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    try:
        return run_on_loop(front(order, settings(order.argv, remarks=False)))
    except (JackfieldError, OSError) as error:
        return fail(error)


async def front(order: Order, found: Settings) -> int:
    """Answer clients until the engine ends, or SIGTERM; → exit status."""
    parent = os.getppid()
    asked_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_end.set)
    keeper, first = keeper_socket(order.folder), order.index == 0
    options = dataclasses.replace(
        found.options,
        started=order.started,
        keeps_at=keeper if first else None,
        kept_at=None if first else keeper,
        num_fronts=order.num_fronts,
        front=order.index,
        usage_at=usage_file(order.folder),
    )
    sockets = tuple(socket.socket(fileno=number) for number in order.sockets)
    engine = RemoteEngine(
        found.config, engine_socket(order.folder), front=order.index, plugins=found.plugins
    )
    try:
        await engine.start()
        async with listening(engine, dataclasses.replace(found.listen, sockets=sockets), options):
            freeze()
            engine.listening()
            await first_of(engine.closed.wait(), asked_to_end.wait())
            if asked_to_end.is_set():
                await first_of(engine.drain(options.shutdown_timeout), engine.closed.wait())
        return 0 if engine.dead_reason is None else 1
    except EngineStopped as error:
        logger.error("front end %d: %s", order.index, error)
        return 1
    finally:
        await engine.stop()
        if engine.lost and await _gone(parent):  # It was killed, and left the folder behind.
            shutil.rmtree(order.folder, ignore_errors=True)


async def _gone(parent: int) -> bool:
    """Whether the process that started this one has ended. Its sockets are closed a little before
    that is seen."""
    for _ in range(100):
        if os.getppid() != parent:
            return True
        await asyncio.sleep(0.01)
    return False


if __name__ == "__main__":
    raise SystemExit(main())
