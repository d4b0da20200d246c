"""Joins an engine's ranks."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec
import torch

from ..config import EngineConfig
from ..errors import ConfigError
from ..protocols.all2all import All2All, All2AllSetup
from ..protocols.collectives import Collectives, CollectivesSetup
from ..registration.choice import choose
from ..registry import Plugins
from .ranks import ONE_STAGE, Group, OneRank, Pipeline, Ranks


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return rank 0's listening socket; port 0: any.

    All ranks get its address, and rank 0's `join` the socket. Raises OSError.
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
    """Join all ranks of `config`'s stages.

    `config`: with a concrete `device`. `address`, `listener`: see `listen`. `local_rank`: the
    device's number on its host; default: `rank`. Blocks. Raises ConfigError.
    """
    local = rank if local_rank is None else local_rank
    device = rank_device(config, local)
    name, collectives, _ = choose(
        plugins["collectives"],
        "collectives",
        config.collectives,
        lambda candidate: candidate.supports(device),
    )

    def group_of(
        rank: int, size: int, address: tuple[str, int], listener: socket.socket | None
    ) -> Collectives:
        setup = CollectivesSetup(
            rank=rank,
            size=size,
            address=address,
            listener=listener,
            device=device,
            timeout=config.distributed_timeout_seconds,
        )
        with plugins["collectives"].calling(name, "its constructor"):
            group: Collectives = collectives(setup)
        return group

    num_stages, tensor_size = config.pipeline_parallel_size, config.tensor_parallel_size
    world = group_of(rank, num_stages * tensor_size, address, listener)
    if num_stages == 1:
        return _ranks(config, plugins, world, ONE_STAGE, address, device, local)
    pipeline = Pipeline.of(world, num_stages, config.pipeline_layer_partition)
    pipeline.connect(device)
    if tensor_size == 1:
        return Ranks(pipeline=pipeline, local_rank=local)
    # The first rank of each stage leads that stage's group.
    leads = rank % tensor_size == 0
    own = listen(own_address(*address)) if leads else None
    addresses = exchange(world, None if own is None else own.getsockname()[:2], device)
    tensor = group_of(rank % tensor_size, tensor_size, addresses[rank - rank % tensor_size], own)
    return _ranks(config, plugins, tensor, pipeline, address, device, local)


def _ranks(
    config: EngineConfig,
    plugins: Plugins,
    tensor: Group,
    pipeline: Pipeline,
    address: tuple[str, int],
    device: torch.device,
    local_rank: int,
) -> Ranks:
    experts = tensor if config.enable_expert_parallel else OneRank()
    all2all = None
    if config.exchanges_tokens:
        all2all = _join_all2all(config, plugins, tensor, address, device)
    return Ranks(
        tensor=tensor, experts=experts, pipeline=pipeline, all2all=all2all, local_rank=local_rank
    )


def _join_all2all(
    config: EngineConfig,
    plugins: Plugins,
    group: Group,
    address: tuple[str, int],
    device: torch.device,
) -> All2All:
    """Join a group's exchange of tokens, led by its first rank."""
    registry = plugins["all2all_backend"]
    name, backend, _ = choose(
        registry, "all2all_backend", config.all2all_backend,
        lambda candidate: candidate.supports(device),
    )  # fmt: skip
    listener = listen(own_address(*address)) if group.rank == 0 else None
    addresses = exchange(group, None if listener is None else listener.getsockname()[:2], device)
    tokens = config.max_num_batched_tokens or config.max_num_seqs
    setup = All2AllSetup(
        rank=group.rank,
        size=group.size,
        address=tuple(addresses[0]),
        listener=listener,
        device=device,
        timeout=config.distributed_timeout_seconds,
        max_tokens=-(-tokens // group.size),
    )
    with registry.calling(name, "its constructor"):
        joined: All2All = backend(setup)
    return joined


def leave(ranks: Ranks) -> None:
    """Leave the groups, after `Worker.stop` dropped the graphs that use them."""
    with contextlib.ExitStack() as closing:  # All of them, also if one raises.
        for group in (ranks.pipeline.world, ranks.tensor, ranks.all2all):
            close = getattr(group, "close", None)
            if close is not None:
                closing.callback(close)


def own_address(host: str, port: int) -> str:
    """Return this host's address towards another."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it only chooses the route.
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def exchange(group: Group, own: Any, device: torch.device) -> list[Any]:
    """Return each rank's value, encoded by MessagePack."""
    frame = msgspec.msgpack.encode(own)
    sizes = group.all_gather(torch.tensor([len(frame)], device=device)).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.int64)
    padded[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    rows = group.all_gather(padded.to(device)).view(len(sizes), -1).tolist()
    return [
        msgspec.msgpack.decode(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)
    ]


def rank_device(config: EngineConfig, local_rank: int) -> torch.device:
    """Return a rank's device. `config`: with a concrete `device`. Raises ConfigError if missing."""
    if config.device != "cuda":
        return torch.device(config.device)
    if local_rank >= (count := torch.cuda.device_count()):
        divided = config.pipeline_parallel_size > 1
        param = "pipeline_parallel_size" if divided else "tensor_parallel_size"
        raise ConfigError(
            f"{param}: rank {local_rank} of this host needs a device of its own, and torch finds "
            f"{count} here; executor=ray uses several hosts",
            param=param,
        )
    return torch.device("cuda", local_rank)
