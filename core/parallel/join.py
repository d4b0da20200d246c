"""Joins an engine's ranks."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec
import torch

from ..config import EngineConfig
from ..config.parallel_options import IN_PLACE
from ..errors import ConfigError
from ..protocols.all2all import All2All, All2AllSetup
from ..protocols.collectives import Collectives, CollectivesSetup
from ..registration.choice import choose
from ..registry import Plugins
from .meeting import Engine
from .ranks import ONE_STAGE, Group, OneRank, Pipeline, Ranks
from .round import Round


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
    if config.num_ranks == 1:
        return _ranks(config, plugins, OneRank(), ONE_STAGE, address, device, local)
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
    if config.divides_experts_among_engines:
        return _among_engines(config, plugins, tensor, device, local_rank)
    experts = tensor if config.enable_expert_parallel else OneRank()
    all2all = None
    if config.exchanges_tokens:
        own = listen(own_address(*address)) if tensor.rank == 0 else None
        addresses = exchange(tensor, None if own is None else own.getsockname()[:2], device)
        all2all = _join_all2all(config, plugins, tensor, tuple(addresses[0]), own, device)
    return Ranks(
        tensor=tensor, experts=experts, pipeline=pipeline, all2all=all2all, local_rank=local_rank
    )


def _among_engines(
    config: EngineConfig, plugins: Plugins, tensor: Group, device: torch.device, local_rank: int
) -> Ranks:
    """Join the ranks of all engines (`data_parallel_size`), which divide the experts."""
    engine = Engine.of_environment()
    size = config.data_parallel_size * tensor.size
    experts = OneRank(engine.number * tensor.size + tensor.rank, size)

    def meet(name: str) -> tuple[tuple[str, int], socket.socket | None]:
        """Return where the first of all ranks listens, and its socket there."""
        own = listen() if experts.rank == 0 else None
        if own is not None:
            engine.tell(name, str(own.getsockname()[1]))
        return ("127.0.0.1", int(engine.wait(name, config.distributed_timeout_seconds))), own

    cpu = torch.device("cpu")
    registry = plugins["collectives"]
    name, of_hosts, _ = choose(
        registry, "collectives", "auto", lambda candidate: candidate.supports(cpu)
    )
    address, listener = meet("counts")
    setup = CollectivesSetup(
        rank=experts.rank, size=size, address=address, listener=listener, device=cpu,
        timeout=config.distributed_timeout_seconds,
    )  # fmt: skip
    with registry.calling(name, "its constructor"):
        counts: Collectives = of_hosts(setup)
    address, listener = meet("tokens")
    all2all = _join_all2all(config, plugins, experts, address, listener, device)
    return Ranks(
        tensor=tensor, experts=experts, all2all=all2all, local_rank=local_rank,
        round=Round(counts, tensor.size),
    )  # fmt: skip


def _join_all2all(
    config: EngineConfig,
    plugins: Plugins,
    group: Group,
    address: tuple[str, int],
    listener: socket.socket | None,
    device: torch.device,
) -> All2All:
    """Join a group's exchange of tokens, led by its first rank."""
    registry = plugins["all2all_backend"]
    in_place = config.all2all_backend in IN_PLACE
    name, backend, _ = choose(
        registry, "all2all_backend", "auto" if in_place else config.all2all_backend,
        lambda candidate: candidate.supports(device),
    )  # fmt: skip
    tokens = config.max_num_batched_tokens or config.max_num_seqs
    setup = All2AllSetup(
        rank=group.rank,
        size=group.size,
        address=address,
        listener=listener,
        device=device,
        timeout=config.distributed_timeout_seconds,
        max_tokens=-(-tokens // config.tensor_parallel_size),
    )
    with registry.calling(name, "its constructor"):
        joined: All2All = backend(setup)
    return joined


def leave(ranks: Ranks) -> None:
    """Leave the groups, after `Worker.stop` dropped the graphs that use them."""
    with contextlib.ExitStack() as closing:  # All of them, also if one raises.
        for group in (ranks.pipeline.world, ranks.tensor, ranks.all2all, ranks.round):
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
