"""`jackfield bench frontend --api-server-count N`: a stub engine with front ends in processes of
their own, and the processor time that each process takes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence

from ...core.engine.async_engine import AsyncEngine
from ...core.remote.server import ForwardingEngine
from ..cli.serve_settings import settings
from ..fronts.sockets import bound
from ..fronts.supervisor import fronted
from ..openai.server import address
from .scripted import ScriptedExecutor


@contextlib.asynccontextmanager
async def serving_fronts(
    executor: ScriptedExecutor, count: int, streams: int, flags: Sequence[str]
) -> AsyncIterator[tuple[str, AsyncEngine]]:
    """The engine here, `count` front ends elsewhere; → (address, engine). flags: more of the
    server's."""
    argv = [
        "--port", "0", "--api-server-count", str(count), "--executor", "scripted",
        "--device", "cpu", "--max-num-seqs", str(streams), *flags,
    ]  # fmt: skip
    found = settings(argv)
    found.plugins["executor"].add("scripted", executor)
    engine = ForwardingEngine(found.config, plugins=found.plugins)
    with (
        tempfile.TemporaryDirectory(prefix="jackfield-") as folder,
        bound(found.listen, count) as sockets,
    ):
        async with fronted(engine, found, folder, sockets) as (server, _):
            executor.others = [front.pid for front in server.fronts]
            yield address(found.listen, sockets[0][0].getsockname()[1]), engine
