"""Joins the ranks of an engine, each in a process or a thread of its own."""

from __future__ import annotations

import socket

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from ..protocols.collectives import Collectives, CollectivesSetup
from ..registration.choice import choose
from ..registry import Plugins
from .ranks import Ranks


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return rank 0's socket, which the others connect to; port 0: any free one.

    Its address (`getsockname()[:2]`) is given to all ranks, and the socket to rank 0's `join`.
    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def join(
    config: EngineConfig,
    plugins: Plugins,
    *,
    rank: int,
    address: tuple[str, int],
    listener: socket.socket | None = None,
    local_rank: int | None = None,
) -> Ranks:
    """Join the group of `config.tensor_parallel_size` ranks; returns when all have joined.

    `config`: its `device` is concrete. `address`, `listener`: see `listen`; only rank 0 has the
    listener. `local_rank`: number of this rank's device on its host; default: `rank`. Blocks, so
    call it outside the event loop. Raises ConfigError.
    """
    local = rank if local_rank is None else local_rank
    device = rank_device(config, local)
    name, collectives, _ = choose(
        plugins["collectives"],
        "collectives",
        config.collectives,
        lambda candidate: candidate.supports(device),
    )
    setup = CollectivesSetup(
        rank=rank,
        size=config.tensor_parallel_size,
        address=address,
        listener=listener,
        device=device,
        timeout=config.distributed_timeout_seconds,
    )
    with plugins["collectives"].calling(name, "its constructor"):
        group: Collectives = collectives(setup)
    return Ranks(tensor=group, local_rank=local)


def leave(ranks: Ranks) -> None:
    """Leave the group. Called after `Worker.stop`, which drops the graphs that use it."""
    close = getattr(ranks.tensor, "close", None)
    if close is not None:
        close()


def rank_device(config: EngineConfig, local_rank: int) -> torch.device:
    """Return the device of a rank, by its number on its host. `config`: its `device` is
    concrete. Raises ConfigError if there is none."""
    if config.device != "cuda":
        return torch.device(config.device)
    if local_rank >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"tensor_parallel_size: rank {local_rank} of this host needs a device of its own, and "
            f"torch finds {count} here",
            param="tensor_parallel_size",
        )
    return torch.device("cuda", local_rank)
