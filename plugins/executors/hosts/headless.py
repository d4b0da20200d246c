"""A host other than the first of an engine: `jackfield serve --headless` (`EngineConfig.nnodes`).

Starts its ranks, each of which takes its orders from rank 0, and ends with them.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import subprocess
import time

from ....core.config import EngineConfig
from ....core.errors import ConfigError, RankFailed
from ....core.remote.frames import BadFrame, encode
from ....core.remote.processes import describe_end, spawn
from ..connections import NotLetIn, connect
from ..messages import DumpStacks, Inbox, RankEnded, RanksOfHost
from ..progress import Progress
from ..spawn import MODULE
from .leader import FIRST_HOST, REMIND_SECONDS, HostRanks, common_secret

POLL_SECONDS = 0.1
RETRY_SECONDS = 0.5
logger = logging.getLogger("jackfield.worker")


def run_headless(config: EngineConfig, node_rank: int) -> int:
    """Run a host's ranks until they have ended; return the exit status, 0 if they ended well.

    Raises ConfigError if the first host does not let this one in, and RankFailed if it is not
    reached.
    """
    ranks = HostRanks.of(config).of_host(node_rank)
    secret = common_secret(config)
    leader = _reach(config, secret, FIRST_HOST + node_rank)
    with leader:
        leader.sendall(encode(RanksOfHost(tuple(ranks))))
        processes = {rank: _start(config, secret, rank) for rank in ranks}
        logger.info("ranks %d to %d are started", ranks[0], ranks[-1])
        return _wait(leader, processes)


def _start(config: EngineConfig, secret: bytes, rank: int) -> subprocess.Popen[bytes]:
    progress = Progress.create()
    try:
        connection = connect((config.master_addr, config.master_port), secret, rank)
    except NotLetIn as error:
        raise RankFailed(f"rank {rank} is not let in: {error}") from error
    except OSError as error:
        raise RankFailed(f"rank {rank}: the first host is gone: {error}") from error
    with connection:
        process = spawn(MODULE, (connection.fileno(), progress.file.fileno()))
    progress.close()
    return process


def _reach(config: EngineConfig, secret: bytes, number: int) -> socket.socket:
    """Return this host's connection to rank 0, which may not listen yet."""
    address = config.master_addr, config.master_port
    begun = reminded = time.monotonic()
    while True:
        try:
            return connect(address, secret, number)
        except NotLetIn as error:
            raise ConfigError(f"master_secret_file: {error}", param="master_secret_file") from error
        except OSError as error:
            now, reason = time.monotonic(), error.strerror or error
        host = f"the first host is not reached at {address[0]}:{address[1]} ({reason})"
        if now - begun > config.distributed_timeout_seconds:
            raise RankFailed(f"{host}, for {config.distributed_timeout_seconds:g} seconds")
        if now - reminded > REMIND_SECONDS:
            reminded = now
            logger.warning("%s", host)
        time.sleep(RETRY_SECONDS)


def _wait(leader: socket.socket, processes: dict[int, subprocess.Popen[bytes]]) -> int:
    """Tell rank 0 of each rank's end, and do what it asks for, until all have ended."""
    status = 0
    orders: Inbox[DumpStacks] = Inbox(leader, DumpStacks)
    watched = [leader]
    while processes:
        if watched and select.select(watched, [], [], POLL_SECONDS)[0]:
            if _asks(orders):
                for process in processes.values():
                    process.send_signal(signal.SIGUSR1)
            else:
                watched = []  # The first host has gone, and the ranks end with their connections.
        elif not watched:
            time.sleep(POLL_SECONDS)
        for rank, process in tuple(processes.items()):
            if (code := process.poll()) is None:
                continue
            del processes[rank]
            status = status or int(code != 0)
            ending = describe_end(code)
            if code:
                logger.error("rank %d %s", rank, ending)
            with contextlib.suppress(OSError):
                leader.sendall(encode(RankEnded(rank, ending)))
    return status


def _asks(orders: Inbox[DumpStacks]) -> bool:
    """Return whether rank 0 has sent an order; False: its connection is closed."""
    try:
        return orders.take() is not None
    except (OSError, BadFrame):
        return False
