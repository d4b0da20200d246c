"""A front-end process: HTTP, tokenizer, templates, parsers; the engine is in another process.

Run as `python -m jackfield.entrypoints.server.frontends.process`, with a `LaunchSpec` on standard
input. Ends with its engine; exits with 0 only on request.
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

from ....core.errors import EngineStopped, JackfieldError
from ....core.remote.client import remote_engine
from ....core.worker.serving_process import freeze
from ...flags.engine_flags import fail
from .. import stateful_proxy
from ..event_loop import run_on_loop
from ..serve_settings import Settings, settings
from ..server import first_of, listening
from .launch_spec import LaunchSpec, engine_socket, stateful_socket, usage_file

logger = logging.getLogger("jackfield.fronts")


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Until the key files can be read again.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The first process handles it.
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=LaunchSpec)
    try:
        return run_on_loop(front(spec, settings(spec.argv, remarks=False)))
    except (JackfieldError, OSError) as error:
        return fail(error)


async def front(spec: LaunchSpec, base: Settings) -> int:
    """Serve until the engine ends, or SIGTERM; return the exit status."""
    parent = os.getppid()
    stop_requested = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_requested.set)
    stateful_at, first = stateful_socket(spec.folder), spec.index == 0
    options = dataclasses.replace(
        base.options,
        started=spec.started,
        keeps_at=stateful_at if first else None,
        kept_at=None if first else stateful_at,
        num_fronts=spec.num_fronts,
        front=spec.index,
        usage_at=usage_file(spec.folder),
    )
    sockets = tuple(socket.socket(fileno=number) for number in spec.sockets)
    engine, core = remote_engine(
        base.config, engine_socket(spec.folder), front=spec.index, plugins=base.plugins
    )
    try:
        await engine.start()
        if not first:
            ends = core.closed.wait(), stop_requested.wait()
            await first_of(stateful_proxy.first_is_serving(stateful_at), *ends)
        async with listening(engine, dataclasses.replace(base.listen, sockets=sockets), options):
            freeze()
            core.send_listening()
            await first_of(core.closed.wait(), stop_requested.wait())
            if stop_requested.is_set():
                await first_of(engine.drain(options.shutdown_timeout), core.closed.wait())
        return 0 if engine.dead_reason is None else 1
    except EngineStopped as error:
        logger.error("front end %d: %s", spec.index, error)
        return 1
    finally:
        await engine.stop()
        if core.lost and await _gone(parent):  # It was killed, and could not remove the folder.
            shutil.rmtree(spec.folder, ignore_errors=True)


async def _gone(parent: int) -> bool:
    """Return whether the parent has ended, waiting briefly: its sockets close just before."""
    for _ in range(100):
        if os.getppid() != parent:
            return True
        await asyncio.sleep(0.01)
    return False


if __name__ == "__main__":
    raise SystemExit(main())
