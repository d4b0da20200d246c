"""The other hosts of an engine (`EngineConfig.nnodes`), for rank 0. Imports nothing large.

Each runs `headless`, which starts its ranks: these, and it, connect to this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from ....core.config import EngineConfig
from ....core.errors import ConfigError, RankFailed
from ....core.remote.frames import BadFrame, FrameReader, encode
from ....core.secret_file import read_secret
from ..connections import Reception
from ..followers import FollowerConnection
from ..messages import DumpStacks, RankEnded, RanksOfHost, ToLeader
from ..progress import Progress

PART = 1 << 16
"""Bytes per read."""
FIRST_HOST = 1 << 15
"""What the greeting of a host has in the place of a rank's number, plus its own number."""
REMIND_SECONDS = 15.0
"""Seconds between log messages while hosts are missing."""
logger = logging.getLogger("jackfield.worker")


class HostRanks(NamedTuple):
    """Ranks by host: neighbours are on one."""

    num_hosts: int
    per_host: int

    @classmethod
    def of(cls, config: EngineConfig) -> HostRanks:
        return cls(config.nnodes, config.num_ranks // config.nnodes)

    def of_host(self, host: int) -> range:
        return range(host * self.per_host, (host + 1) * self.per_host)


def common_secret(config: EngineConfig) -> bytes:
    """Return what all hosts know. Raises ConfigError."""
    if config.master_secret_file is None:
        raise ConfigError(
            "nnodes: hosts meet over TCP: give all of them a file with the same secret "
            "(master_secret_file); make one with: openssl rand -hex 32",
            param="master_secret_file",
        )
    try:
        return read_secret(config.master_secret_file)
    except ValueError as error:
        raise ConfigError(f"master_secret_file: {error}", param="master_secret_file") from error


class Host:
    """Another host: what it says of its ranks."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.address: str = connection.getpeername()[0]
        self.ranks: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        """That it starts. Raises RankFailed if it ends before."""
        self._endings: dict[int, str] = {}
        self._ended = False
        self._reader: FrameReader[RanksOfHost | RankEnded] = FrameReader(RanksOfHost | RankEnded)
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._loop.add_reader(connection.fileno(), self._read)

    def __str__(self) -> str:
        return f"host {self.number} ({self.address})"

    def ending(self, rank: int) -> str | None:
        """Return the rest of a sentence on a rank's end; None if it is not known to have ended."""
        lost = "is gone with its `jackfield serve --headless`" if self._ended else None
        return self._endings.get(rank, lost)

    def dump_stacks(self) -> None:
        """Make all of its ranks write their stacks to its standard error."""
        with contextlib.suppress(OSError):
            self._socket.send(encode(DumpStacks()))

    def close(self) -> None:
        """End the connection, and with it the other side."""
        self._end()
        self._socket.close()
        self.ranks.cancel()

    def _read(self) -> None:
        try:
            data = self._socket.recv(PART)
            messages = list(self._reader.read_frames(data))
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            data, messages = b"", []
        for message in messages:
            if isinstance(message, RankEnded):
                self._endings[message.rank] = message.ending
            elif not self.ranks.done():
                self.ranks.set_result(message.ranks)
        if not data:
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._socket.fileno())
            if not self.ranks.done():
                self.ranks.set_exception(RankFailed(f"{self} has left before its ranks came"))
                self.ranks.exception()  # Perhaps nobody asks.


class HostFollower(FollowerConnection):
    """A rank of another host."""

    def __init__(
        self,
        rank: int,
        local_rank: int,
        host: Host,
        connection: socket.socket,
        *,
        received: Callable[[int, ToLeader], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self.local_rank = local_rank
        self.host = host.address
        self.where = f" on {host}"
        self._of = host
        super().__init__(rank, connection, Progress.create(), received=received, lost=lost)

    def ending(self) -> str | None:
        return self._of.ending(self.rank)

    def dump_stacks(self) -> None:
        if self.local_rank == 0:  # All of a host write theirs at once.
            self._of.dump_stacks()

    def _kill(self) -> None:
        """The process ends with its connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class OtherHosts:
    """The hosts from 1, and the ranks on them."""

    def __init__(self, config: EngineConfig) -> None:
        """Listens for them from here on. Raises ConfigError."""
        from ....core.parallel.join import listen

        self._config = config
        self._ranks = HostRanks.of(config)
        self._address = f"{config.master_addr}:{config.master_port}"
        secret = common_secret(config)
        try:
            listener = listen(config.master_addr, config.master_port)
        except OSError as error:
            raise ConfigError(
                f"master_addr: this host cannot be reached at {self._address}: "
                f"{error.strerror or error}",
                param="master_addr",
            ) from error
        numbers = [FIRST_HOST + host for host in range(1, self._ranks.num_hosts)]
        self._reception = Reception(
            listener, [*numbers, *range(self._ranks.per_host, config.num_ranks)], secret
        )
        self._hosts: list[Host] = []

    async def followers(
        self, received: Callable[[int, ToLeader], None], lost: Callable[[int, str], None]
    ) -> AsyncIterator[HostFollower]:
        """Yield each as it comes, by rank. Raises RankFailed for hosts that do not come, or bring
        other ranks."""
        config = self._config
        deadline = time.monotonic() + config.distributed_timeout_seconds
        connections = self._reception.connections
        for number in range(1, self._ranks.num_hosts):
            ranks = self._ranks.of_host(number)
            await self._wait(connections[FIRST_HOST + number], number, deadline)
            host = Host(number, self._reception.take(FIRST_HOST + number))
            self._hosts.append(host)
            await self._wait(host.ranks, number, deadline)
            if (own := host.ranks.result()) != tuple(ranks):
                raise RankFailed(
                    f"{host} has the ranks {own}, not {tuple(ranks)}: give it the same nnodes, "
                    "tensor_parallel_size and pipeline_parallel_size"
                )
            for local, rank in enumerate(ranks):
                await self._wait(connections[rank], number, deadline)
                connection = self._reception.take(rank)
                yield HostFollower(rank, local, host, connection, received=received, lost=lost)
            logger.info("ranks %d to %d are on %s", ranks[0], ranks[-1], host)
        await self._reception.close()

    async def _wait(self, arrival: asyncio.Future[Any], host: int, deadline: float) -> None:
        missing = (
            f"host {host} of {self._ranks.num_hosts} has not come to {self._address}: run the same "
            f"command there, with --headless --node-rank {host}"
        )
        while not arrival.done():
            left = deadline - time.monotonic()
            if left <= 0:
                seconds = self._config.distributed_timeout_seconds
                raise RankFailed(f"{missing} (waited for {seconds:g} seconds)")
            done, _ = await asyncio.wait([arrival], timeout=min(left, REMIND_SECONDS))
            if not done:
                logger.warning("%s", missing)
        arrival.result()

    async def close(self) -> None:
        """End what is left of the connections."""
        await self._reception.close()
        for host in self._hosts:
            host.close()
