"""The groups from which one rank gets new weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import InvalidRequest, LoadError, shown
from ..live.worker_jobs import JoinSenders, ReceiveWeights
from ..loading.second_model import dtype_named
from ..parallel.broadcast import BroadcastGroup

Take = Callable[[str, torch.Tensor], None]


class WeightSenders:
    """Groups by name. For one thread."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """rank: of the engine's ranks."""
        self._rank, self._device = rank, device
        self._groups: dict[str, BroadcastGroup] = {}

    def join(self, job: JoinSenders) -> None:
        """Join a group. Raises InvalidRequest."""
        if job.group in self._groups:
            raise InvalidRequest(
                f"group_name: the engine is in a group {shown(job.group)} already; leave it first",
                param="group_name",
            )
        try:
            self._groups[job.group] = BroadcastGroup(
                job.host, job.port, job.rank_offset + self._rank, job.world_size, self._device,
                name=job.group, backend=job.backend, timeout=job.timeout,
                packed_bytes=job.packed_bytes, rendezvous=job.rendezvous, unique_id=job.unique_id,
            )  # fmt: skip
        except (RuntimeError, OSError, ValueError) as error:
            raise InvalidRequest(
                f"master_address: rank {self._rank} cannot join the group at {job.host}:"
                f"{job.port} within {job.timeout:g} seconds: {str(error).splitlines()[0]}",
                param="master_address",
            ) from error

    def leave(self, name: str) -> None:
        """Leave a group. Raises InvalidRequest."""
        self._find(name).close()
        del self._groups[name]

    def _find(self, name: str) -> BroadcastGroup:
        if (group := self._groups.get(name)) is None:
            raise InvalidRequest(
                f"group_name: the engine is in no group {shown(name)}", param="group_name"
            )
        return group

    def receive(self, job: ReceiveWeights, take: Take) -> None:
        """Pass on the tensors that number 0 sends. Raises LoadError if it has gone, after which the
        group is of no use."""
        group = self._find(job.group)
        tensors = [(part.name, part.shape, dtype_named(part)) for part in job.parts]
        refusal: Exception | None = None
        try:
            for name, tensor in group.receive(tensors):
                # All of them are received in any case: the sender sends them.
                if refusal is None:
                    try:
                        take(name, tensor)
                    except Exception as error:
                        refusal = error
        except RuntimeError as error:
            self._groups.pop(job.group).close()
            raise LoadError(
                f"the sender of weights in group {job.group!r} has gone, or did not send what it "
                f"announced: {str(error).splitlines()[0]}"
            ) from error
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Leave all groups."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()
