"""The Ray cluster: its connection, the placement of ranks, and their actors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from typing import Any, ClassVar, NamedTuple

from ....core.errors import ConfigError, RankFailed
from .actor import RankActor

logger = logging.getLogger("jackfield.worker")
POLL_SECONDS = 0.05
TOGETHER_SECONDS = 5.0
"""Seconds to wait for room on a single host before ranks may use several."""
REACH_SECONDS = 5.0
"""Seconds for the cluster's address to accept a connection."""
REMIND_SECONDS = 15.0
"""Seconds between log messages while ranks wait for room."""
ALL_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Ray's switch that lets a process see all GPUs of its host, as peers that share memory must."""
COPIED = ("JACKFIELD_", "NCCL_", "GLOO_", "TORCH_", "TRITON_", "HF_")
"""Prefixes of rank 0's variables that are defaults of the other ranks."""


def load_ray() -> Any:
    """Return the package; raises ConfigError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"executor: ray needs a package that is not installed ({error}): pip install ray",
            param="executor",
        ) from error
    return ray


class Node(NamedTuple):
    """A host of the cluster."""

    id: str
    name: str
    address: str
    resources: dict[str, float]
    """Total, used or not."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class Connection:
    """This process's driver connection, shared by its engines."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _users: ClassVar[int] = 0
    _own: ClassVar[bool] = False
    """Whether it was opened here."""

    @classmethod
    def open(cls) -> None:
        """Connect unless connected. Blocks. Raises ConfigError."""
        ray = load_ray()
        with cls._lock:
            if not ray.is_initialized():
                _connect(ray)
                cls._own = True
            cls._users += 1

    @classmethod
    def close(cls) -> None:
        """End the connection with its last user, if it was opened here."""
        ray = load_ray()
        with cls._lock:
            cls._users -= 1
            if cls._own and not cls._users:
                cls._own = False
                ray.shutdown()


def _connect(ray: Any) -> None:
    """Not for the main thread, where Ray would take over SIGTERM."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"executor: RAY_ADDRESS={address} is a Ray client's: rank 0 is this process, which has "
            "to be on a host of the cluster",
            param="executor",
        )
    own = logging.getLogger("ray")
    level = own.level
    own.setLevel(logging.ERROR)  # It would warn that it leaves SIGTERM alone.
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():  # Ray itself would try for minutes.
            socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
        ray.init(address="auto", configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"executor: no Ray cluster is reached from here ({str(error).splitlines()[0]}): run "
            "`ray start --head` on this host and `ray start --address=...` on the others, or set "
            "RAY_ADDRESS, and Ray's variables for its token if it has one",
            param="executor",
        ) from error
    finally:
        own.setLevel(level)


class RemoteRank:
    """The actor of a rank other than 0."""

    def __init__(self, rank: int, node: Node, actor: Any) -> None:
        self.rank, self.node, self.actor = rank, node, actor
        self.ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Rest of a sentence that describes its end."""

    def run(self, *arguments: Any) -> None:
        loop = asyncio.get_running_loop()

        def ended(done: Any) -> None:
            with contextlib.suppress(RuntimeError):  # The loop has closed.
                loop.call_soon_threadsafe(self._end, describe_ending(done.exception()))

        self.actor.run.remote(*arguments).future().add_done_callback(ended)

    def _end(self, ending: str) -> None:
        if not self.ending.done():
            self.ending.set_result(ending)


class Placement:
    """A Ray placement group with a bundle per rank; bundle 0 is on this process's node."""

    given: ClassVar[Any] = None
    """Group for this process's ranks, created by another process; None: it creates one."""

    def __init__(self, resource: str, size: int) -> None:
        """resource: "GPU" or "CPU", one per rank."""
        self.resource, self.size = resource, size
        self.nodes: list[Node] = []
        """By rank, once reserved: rank 0's host first."""
        self._ray = load_ray()
        self.group: Any = None
        self._group: Any = None
        """The same, if it was created here and is to be removed here."""
        self._bundles: list[int] = []
        self._actors: list[Any] = []

    async def reserve(self, seconds: float) -> None:
        """Wait for room for all ranks. Raises ConfigError if there cannot be any, and RankFailed
        after `seconds`.
        """
        own: str = self._ray.get_runtime_context().get_node_id()
        nodes = await asyncio.to_thread(self._alive)
        here = int(nodes[own].resources.get(self.resource, 0))
        if here < 1:
            raise ConfigError(
                f"executor: rank 0 is this process, and Ray has no {self.resource} on its host "
                f"{nodes[own]}: start jackfield on a host that has one",
                param="executor",
            )
        if self.given is not None:
            await self._settle(nodes, own, self.given)
            return
        await self._await_room(nodes, own, here >= self.size, seconds)

    async def reserve_anywhere(self, seconds: float) -> None:
        """As `reserve`, with rank 0 on any host."""
        nodes = await asyncio.to_thread(self._alive)
        rooms = [int(node.resources.get(self.resource, 0)) for node in nodes.values()]
        await self._await_room(nodes, None, max(rooms) >= self.size, seconds)

    def own_address(self) -> str:
        """Return this host's address in the cluster."""
        own: str = self._ray.get_runtime_context().get_node_id()
        return self._alive()[own].address

    async def _await_room(
        self, nodes: dict[str, Node], own: str | None, together: bool, seconds: float
    ) -> None:
        """Wait for a group of all ranks, on one host if `together`. own: rank 0's node; None:
        any.
        """
        began = reminded = time.monotonic()
        await asyncio.to_thread(self._ask, own, together)
        while (await asyncio.to_thread(self._table))["state"] != "CREATED":
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            if together and now - began > TOGETHER_SECONDS:
                together = False
                await asyncio.to_thread(self._ask, own, together)
            if now - began > seconds:
                raise RankFailed(f"{self._missing(nodes, own)}, for {seconds:g} seconds")
            if now - reminded > REMIND_SECONDS:
                reminded = now
                nodes = await asyncio.to_thread(self._alive)
                logger.warning("%s", self._missing(nodes, own))
        await self._settle(await asyncio.to_thread(self._alive), own, self._group)

    async def _settle(self, nodes: dict[str, Node], own: str | None, group: Any) -> None:
        """Number the ranks by the bundles of a reserved group."""
        self.group = group
        places = (await asyncio.to_thread(self._table))["bundles_to_node_id"]
        own = places[0] if own is None else own
        self._bundles = sorted(
            places, key=lambda bundle: (bundle > 0, places[bundle] != own, places[bundle], bundle)
        )
        self.nodes = [nodes[places[bundle]] for bundle in self._bundles]

    def _ask(self, own: str | None, together: bool) -> None:
        """Request the bundles, replacing earlier requests. `own`: rank 0's node, None: any;
        `together`: all on one node.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        selector = {} if own is None else {"ray.io/node-id": own}
        self._group = self.group = placement_group(
            [{self.resource: 1}] * self.size,
            strategy="STRICT_PACK" if together else "PACK",
            bundle_label_selector=[selector] + [selector if together else {}] * (self.size - 1),
        )

    def _alive(self) -> dict[str, Node]:
        return {
            node["NodeID"]: Node(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                node["Resources"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        }

    def _table(self) -> dict[str, Any]:
        from ray.util.placement_group import placement_group_table

        table: dict[str, Any] = placement_group_table(self.group)
        return table

    def _missing(self, nodes: dict[str, Node], own: str | None) -> str:
        free = self._ray.available_resources().get(self.resource, 0)
        there = ", ".join(
            f"{node} has {node.resources.get(self.resource, 0):g}" for node in nodes.values()
        )
        first = ", rank 0 on this host" if own else ""
        return (
            f"{self.size} ranks wait for a {self.resource} each in the Ray cluster{first}: {there}"
            f"; {free:g} of them are free"
        )

    def start_actors(self) -> list[RemoteRank]:
        """Start the other ranks' actors and, for GPUs, one that holds rank 0's."""
        own = [self._actor(0)] if self.resource == "GPU" else []
        remotes = [
            RemoteRank(rank, self.nodes[rank], self._actor(rank)) for rank in range(1, self.size)
        ]
        self._actors = [*own, *(remote.actor for remote in remotes)]
        return remotes

    def start_engine(self, number: int, kind: type) -> RemoteRank:
        """Start the actor of an engine, a `kind`, next to its rank 0, which keeps its bundle."""
        remote = RemoteRank(number, self.nodes[0], self._actor(0, kind))
        self._actors = [remote.actor]
        return remote

    def _actor(self, rank: int, kind: type = RankActor) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        gpus = int(self.resource == "GPU")
        holds = kind is RankActor
        return (
            self._ray.remote(kind)
            .options(
                num_gpus=gpus if holds else 0,
                num_cpus=1 - gpus if holds else 0,
                max_concurrency=2,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=self._bundles[rank]
                ),
                runtime_env={"env_vars": {ALL_VISIBLE: "1"}} if gpus else None,
            )
            .remote()
        )

    async def own_gpu(self) -> str:
        gpu: str = await self._actors[0].gpu.remote()
        return gpu

    def release(self) -> None:
        """End the actors, and release the bundles. Blocks."""
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            self._ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            group, self._group = self._group, None
            remove_placement_group(group)


def copied_environment() -> dict[str, str]:
    """Return this process's variables that are other ranks' defaults."""
    return {name: value for name, value in os.environ.items() if name.startswith(COPIED)}


def describe_ending(error: BaseException | None) -> str:
    """Return the rest of a sentence on an actor's end. error: what its run raised."""
    if error is None:
        return "ended"
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # Raised by our own code there.
        return f"failed: {type(cause).__name__}: {cause}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = next((line for line in lines if line.startswith("The actor is dead")), lines[0])
    reason = reason.partition(" Some common causes")[0].strip()
    return f"is gone: {reason.rstrip('.')}"
