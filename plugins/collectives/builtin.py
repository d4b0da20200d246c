"""Collectives of torch.distributed's libraries: NCCL between GPUs, gloo between CPUs.

Each group has a store and connections of its own: torch's global groups, and the environment
variables that they are usually configured by, are left alone.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from ...core.errors import ConfigError
from ...core.protocols.collectives import CollectivesSetup


class _Collectives:
    """What both libraries share."""

    def __init__(self, setup: CollectivesSetup) -> None:
        self.rank, self.size = setup.rank, setup.size
        # Not asynchronous: NCCL then queues on the current stream instead of one of its own.
        self._sum = AllreduceOptions()
        self._gather = AllgatherOptions()
        self._sum.asyncOp = self._gather.asyncOp = False
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
        """Add in place."""
        _wait(self._group.allreduce([x], self._sum))
        return x if residual is None else residual.add_(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The library joins in the first dimension: with several rows, their parts are moved."""
        parts = x.new_empty((self.size, *x.shape))
        _wait(self._group._allgather_base(parts.view(-1), x.flatten(), self._gather))
        return parts.movedim(0, -2).flatten(-2)

    def close(self) -> None:
        """End the connections."""
        del self._group, self._store


def _wait(work: Any) -> None:
    """Wait on the host for gloo. NCCL returns nothing to wait for: it uses the current stream."""
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
        own = _own_address(*setup.address)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        store = PrefixStore("gloo", self._store)
        return dist.ProcessGroupGloo(store, setup.rank, setup.size, options)


class Nccl(_Collectives):
    """Tensors of CUDA devices, each rank with a device of its own."""

    @staticmethod
    def supports(device: torch.device) -> str | None:
        """Needs CUDA."""
        if not (dist.is_available() and dist.is_nccl_available()):
            return "this build of torch has no NCCL"
        return None if device.type == "cuda" else "it is for CUDA devices"

    def _join(self, setup: CollectivesSetup, timeout: timedelta) -> Any:
        # Multicast needs rights that containers often lack, and pays for large tensors only.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(setup.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        store = PrefixStore("nccl", self._store)
        return dist.ProcessGroupNCCL(store, setup.rank, setup.size, options)

    def close(self) -> None:
        """Abort, because a shutdown would wait for the other ranks."""
        self._group.abort()
        super().close()


def _own_address(host: str, port: int) -> str:
    """Return this host's address on the way to another, or to itself."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it only chooses the route.
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address
