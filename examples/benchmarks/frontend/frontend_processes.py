"""`--api-server-count N`: a fake engine with front ends in processes of
their own, and the processor time of each process."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence

from jackfield.core.engine.async_engine import AsyncEngine
from jackfield.core.engine.core import EngineCore
from jackfield.entrypoints.server.frontends.sockets import bound
from jackfield.entrypoints.server.frontends.supervisor import fronted
from jackfield.entrypoints.server.serve_settings import settings
from jackfield.entrypoints.server.server import address

from .fake_executor import ScriptedExecutor


@contextlib.asynccontextmanager
async def serving_fronts(
    executor: ScriptedExecutor, count: int, streams: int, flags: Sequence[str]
) -> AsyncIterator[tuple[str, AsyncEngine]]:
    """Run the engine here and `count` front ends in other processes; yield (address, engine).
    flags: further flags of the server."""
    argv = [
        "--port", "0", "--api-server-count", str(count), "--executor", "scripted",
        "--device", "cpu", "--max-num-seqs", str(streams), *flags,
    ]  # fmt: skip
    base = settings(argv)
    base.plugins["executor"].add("scripted", executor)
    core = EngineCore(base.config, base.plugins)
    engine = AsyncEngine(base.config, plugins=base.plugins, core=core)
    with (
        tempfile.TemporaryDirectory(prefix="jackfield-") as folder,
        bound(base.listen, count) as sockets,
    ):
        signals: asyncio.Queue[int] = asyncio.Queue()  # None come: the benchmark handles its own.
        async with fronted(engine, core, base, folder, sockets, signals) as (server, _):
            executor.others = [front.pid for front in server.fronts]
            yield address(base.listen, sockets[0][0].getsockname()[1]), engine
