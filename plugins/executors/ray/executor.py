"""Ranks on the hosts of a Ray cluster: rank 0 in this process, each other one in an actor. Ray
starts the processes and detects their end; plans and jobs travel by TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ....core.config import EngineConfig
from ....core.errors import RankFailed
from ....core.registry import Plugins
from ..connections import Reception
from ..followers import FollowerConnection
from ..messages import ToLeader
from ..processes import Place, ProcessesExecutor
from ..progress import Progress
from .actor import VISIBLE, device_number
from .cluster import Connection, Placement, RemoteRank, copied_environment, load_ray
from .engines import RayEngines

if TYPE_CHECKING:
    from ....core.loading.model_config import ModelConfig
logger = logging.getLogger("jackfield.worker")


class RayFollower(FollowerConnection):
    """A rank in an actor."""

    reap_seconds: ClassVar[float] = 5.0
    kill_seconds: ClassVar[float] = 5.0

    def __init__(
        self,
        remote: RemoteRank,
        connection: socket.socket,
        local_rank: int,
        process: int,
        *,
        received: Callable[[int, ToLeader], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self.local_rank = local_rank
        self.process = process
        """Process number on its host."""
        self._remote = remote
        self._ray = load_ray()
        self.host = remote.node.name
        self.where = f" on {remote.node}"
        super().__init__(remote.rank, connection, Progress.create(), received=received, lost=lost)
        remote.ending.add_done_callback(lambda _: self.lose())

    def ending(self) -> str | None:
        ending = self._remote.ending
        return ending.result() if ending.done() else None

    def dump_stacks(self) -> None:
        self._remote.actor.dump_stacks.remote()

    def _kill(self) -> None:
        """The process ends with its connection, even if Ray does not reach it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._ray.kill(self._remote.actor)


class RayExecutor(ProcessesExecutor):
    """As `processes`, on several hosts."""

    joins_engines = joins_hosts = False

    def __init__(self, config: EngineConfig, model_config: ModelConfig, plugins: Plugins) -> None:
        """Raises ConfigError without Ray."""
        load_ray()
        super().__init__(config, model_config, plugins)
        self._connected = False
        self._placement: Placement | None = None

    @staticmethod
    def start_ahead(config: EngineConfig) -> None:
        """Nothing: the hosts are not known yet."""

    @staticmethod
    def engine_hosts(config: EngineConfig) -> RayEngines:
        return RayEngines(config)

    @staticmethod
    def initialize_device(config: EngineConfig, plugins: Plugins) -> None:
        """Nothing: Ray chooses the GPU."""

    async def _start_others(self) -> Place:
        from ....core.parallel.join import listen

        seconds = self.config.distributed_timeout_seconds
        await asyncio.to_thread(Connection.open)
        self._connected = True
        gpus = self.config.device == "cuda"
        placement = self._placement = Placement("GPU" if gpus else "CPU", self.size)
        await placement.reserve(seconds)
        several = len({node.id for node in placement.nodes}) > 1
        if several and gpus and self.config.collectives == "auto":
            # Each rank would choose by what it sees on its own host.
            self.config = msgspec.structs.replace(self.config, collectives="nccl")
        remotes = placement.start_actors()
        host = placement.nodes[0].address
        reception = Reception(listen(host), range(1, self.size))
        try:
            environment = copied_environment()
            for remote in remotes:
                remote.run(reception.address, reception.secret, remote.rank, environment)
            await self._connect_all(remotes, reception, seconds)
            own = await placement.own_gpu() if gpus else "0"
            for remote in remotes:
                process, device = await remote.actor.process.remote(gpus)
                connection = reception.take(remote.rank)
                follower = RayFollower(
                    remote, connection, device, process, received=self._receive, lost=self._lose
                )
                self.followers.append(follower)
                logger.info("rank %d is process %d%s", remote.rank, process, follower.where)
        finally:
            await reception.close()
        return Place(host, device_number(own, os.environ.get(VISIBLE)) if gpus else 0)

    async def _connect_all(
        self, remotes: list[RemoteRank], reception: Reception, seconds: float
    ) -> None:
        """Wait for all connections; raises RankFailed if one is missing."""
        arrivals: set[asyncio.Future[Any]] = {
            reception.connections[remote.rank] for remote in remotes
        }
        endings = [remote.ending for remote in remotes]
        deadline = time.monotonic() + seconds
        while arrivals:
            done, _ = await asyncio.wait(
                [*arrivals, *endings],
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for remote in remotes:
                missing = not reception.connections[remote.rank].done()
                if missing and (remote.ending.done() or not done):
                    how = (
                        remote.ending.result()
                        if done
                        else f"has not reached {reception.address} in {seconds:g} seconds"
                    )
                    raise RankFailed(f"rank {remote.rank} of {self.size} on {remote.node} {how}")
            arrivals -= done

    async def _end_others(self) -> None:
        """Remove all actors and the placement group."""
        await super()._end_others()
        placement, self._placement = self._placement, None
        try:
            if placement is not None:
                await asyncio.to_thread(placement.release)
        except Exception as error:
            logger.warning("Ray's placement group was not removed: %s", error)
        if self._connected:
            self._connected = False
            await asyncio.to_thread(Connection.close)
