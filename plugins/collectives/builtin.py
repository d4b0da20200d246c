"""Collectives of torch.distributed's libraries: NCCL between GPUs, gloo between CPUs.

Each group has a store and connections of its own: torch's global groups, and the environment
variables that they are usually configured by, are left alone.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllToAllOptions,
)

from ...core.errors import ConfigError
from ...core.parallel.join import own_address
from ...core.parallel.ranks import Transfer
from ...core.protocols.collectives import CollectivesSetup

LEFT_TO_THE_ENGINE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""Otherwise torch's watchdog ends this process when a call fails or times out because a rank is
gone, or after a device error, before the engine can notify its requests. Without it, such a call
waits until the engine detects the lost rank and leaves the group."""


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set unset variables temporarily, for a constructor that reads them."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class _Collectives:
    def __init__(self, setup: CollectivesSetup) -> None:
        self.rank, self.size = setup.rank, setup.size
        # Not asynchronous: NCCL then queues on the current stream instead of one of its own.
        self._sum = AllreduceOptions()
        self._gather = AllgatherOptions()
        self._exchange = AllToAllOptions()
        self._sum.asyncOp = self._gather.asyncOp = self._exchange.asyncOp = False
        self._sending: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()
        """Sends that may be in flight: the libraries still read these tensors."""
        host, port = setup.address
        timeout = timedelta(seconds=setup.timeout)
        listener = None if setup.listener is None else setup.listener.detach()
        try:
            self._store = TCPStore(
                host,
                port,
                setup.size,
                is_master=setup.rank == 0,
                timeout=timeout,
                master_listen_fd=listener,
            )
            self._group = self._join(setup, timeout)
            # Connections are made by the first call, which must not be one that is recorded.
            self.all_reduce(torch.zeros(1, device=setup.device)).item()
        except RuntimeError as error:
            raise ConfigError(
                f"tensor_parallel_size: rank {setup.rank} of {setup.size} cannot join the others "
                f"at {host}:{port}: {str(error).splitlines()[0]}",
                param="tensor_parallel_size",
            ) from error

    def _join(self, setup: CollectivesSetup, timeout: timedelta) -> Any:
        raise NotImplementedError

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        _wait(self._group.allreduce([x], self._sum))
        return x if residual is None else residual.add_(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The library joins along the first dimension, so the parts of several rows are moved."""
        parts = x.new_empty((self.size, *x.shape))
        _wait(self._group._allgather_base(parts.view(-1), x.flatten(), self._gather))
        return parts.movedim(0, -2).flatten(-2)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        into = x.new_empty((sum(received), *x.shape[1:]))
        _wait(self._group.alltoall_base(into, x.contiguous(), received, sent, self._exchange))
        return into

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a copy, so that the caller may overwrite `x`."""
        sending = self._sending
        while sending and sending[0][0].is_completed():
            sending.popleft()
        copy = x.clone()
        group, number = self._link(self.rank, to)
        sending.append((group.send([copy], number, 0), copy))

    def receive(self, into: torch.Tensor, source: int) -> Transfer:
        group, number = self._link(source, self.rank)
        transfer: Transfer = group.recv([into], number, 0)
        return transfer

    def _link(self, source: int, target: int) -> tuple[Any, int]:
        """Return the library's group for tensors from one rank to another, and the peer's number in
        it.
        """
        return self._group, target if source == self.rank else source

    def close(self) -> None:
        self._sending.clear()
        del self._group, self._store


def _wait(work: Any) -> None:
    """Wait on the host for gloo; NCCL uses the current stream and returns None."""
    if work is not None:
        work.wait()


class Gloo(_Collectives):
    """Tensors of CPUs, over TCP."""

    @staticmethod
    def supports(device: torch.device) -> str | None:
        """Needs a CPU."""
        if not (dist.is_available() and dist.is_gloo_available()):
            return "this build of torch has no gloo"
        return None if device.type == "cpu" else "it is for CPUs"

    def _join(self, setup: CollectivesSetup, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        # The name of a host need not resolve to an address that others can reach.
        own = own_address(*setup.address)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        store = PrefixStore("gloo", self._store)
        return dist.ProcessGroupGloo(store, setup.rank, setup.size, options)


class Nccl(_Collectives):
    """For CUDA devices, one per rank."""

    @staticmethod
    def supports(device: torch.device) -> str | None:
        if not (dist.is_available() and dist.is_nccl_available()):
            return "this build of torch has no NCCL"
        return None if device.type == "cuda" else "it is for CUDA devices"

    def __init__(self, setup: CollectivesSetup) -> None:
        self._links: dict[tuple[int, int], Any] = {}
        """(source, target) → connections and a stream per direction, so that neither the other
        direction nor a step delays it."""
        super().__init__(setup)

    def _join(self, setup: CollectivesSetup, timeout: timedelta) -> Any:
        # Multicast needs rights that containers often lack, and pays for large tensors only.
        # NCCL reads it when it makes connections.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(setup.device)
        self._timeout = timeout
        return self._library("nccl", setup.rank, setup.size)

    def _library(self, name: str, rank: int, size: int) -> Any:
        """Return the library's unconnected group of this name."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with _environment(LEFT_TO_THE_ENGINE):
            return dist.ProcessGroupNCCL(PrefixStore(name, self._store), rank, size, options)

    def _link(self, source: int, target: int) -> tuple[Any, int]:
        if (source, target) not in self._links:
            name, number = f"link/{source}/{target}", int(self.rank == target)
            self._links[source, target] = self._library(name, number, 2)
        return self._links[source, target], int(self.rank == source)

    def close(self) -> None:
        """Abort: a shutdown would wait for the other ranks."""
        for group in (self._group, *self._links.values()):
            group.abort()
        self._links.clear()
        super().close()
