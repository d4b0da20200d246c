"""Places the engines of `data_parallel_size` on hosts with room for their ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

from ....core.config import EngineConfig
from ....core.errors import RankFailed
from ..connections import Reception
from .cluster import Connection, Placement, RemoteRank, copied_environment, load_ray
from .engine_actor import EngineActor

logger = logging.getLogger("jackfield.member")


class RayEngine:
    """An engine in an actor with rank 0; its other ranks are its own actors."""

    def __init__(
        self, remote: RemoteRank, connection: socket.socket, release: Callable[[], None]
    ) -> None:
        self.connection = connection
        self.where = f" on {remote.node}"
        self._remote, self._ray, self._release = remote, load_ray(), release

    def ending(self) -> str | None:
        ending = self._remote.ending
        return ending.result() if ending.done() else None

    def kill(self) -> None:
        """End the actor, and with it its ranks' actors."""
        self._ray.kill(self._remote.actor)

    async def release(self) -> None:
        await asyncio.to_thread(self._release)


class RayEngines:
    """Finds room for each engine separately, with its rank 0 anywhere."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    async def start(self, number: int) -> RayEngine:
        """Raises ConfigError without a cluster, and RankFailed without room or a connection."""
        from ....core.engine.resolve_config import resolve_device
        from ....core.parallel.join import listen

        config, seconds = self.config, self.config.distributed_timeout_seconds
        gpus = config.device == "cuda" or resolve_device(config) == "cuda"
        await asyncio.to_thread(Connection.open)
        placement = Placement("GPU" if gpus else "CPU", config.num_ranks)

        def release() -> None:
            try:
                placement.release()
            finally:
                Connection.close()

        try:
            await placement.reserve_anywhere(seconds)
            reception = Reception(listen(placement.own_address()), range(number, number + 1))
            try:
                remote = placement.start_engine(number, EngineActor)
                remote.run(
                    reception.address, reception.secret, number, copied_environment(),
                    placement.group,
                )  # fmt: skip
                arrival: asyncio.Future[Any] = reception.connections[number]
                await asyncio.wait(
                    [arrival, remote.ending], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not arrival.done():
                    late = f"has not reached {reception.address} in {seconds:g} seconds"
                    how = remote.ending.result() if remote.ending.done() else late
                    raise RankFailed(f"member {number} on {remote.node} {how}")
                connection = reception.take(number)
            finally:
                await reception.close()
        except BaseException:
            with contextlib.suppress(Exception):
                await asyncio.shield(asyncio.to_thread(release))
            raise
        logger.info("member %d is on %s", number, remote.node)
        return RayEngine(remote, connection, release)
