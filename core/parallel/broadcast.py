"""A `torch.distributed` group in which number 0 sends tensors to all others.

Beside the groups in which an engine computes, and torch's global ones: a trainer and the ranks of
an engine join it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]

from .join import own_address


class BroadcastGroup:
    """Joins when created, which waits for all others. Raises RuntimeError after `timeout`
    seconds."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        device: torch.device,
        *,
        name: str = "weights",
        backend: str = "",
        timeout: float = 300.0,
        packed_bytes: int = 0,
    ) -> None:
        """host, port: where number 0 listens. name: of the group; all say the same. backend: "nccl"
        or "gloo"; "": by the device. packed_bytes: more than 0: tensors travel joined in buffers of
        bytes, a new one where the next tensor would exceed this; all say the same.
        """
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        if backend not in ("nccl", "gloo"):
            raise ValueError(f"backend: must be nccl or gloo, got {backend!r}")
        self.rank, self.size, self.packed_bytes = rank, size, packed_bytes
        self.device = device if backend == "nccl" else torch.device("cpu")
        """Where tensors are sent from and received to."""
        limit = timedelta(seconds=timeout)
        self._store = TCPStore(host, port, size, is_master=rank == 0, timeout=limit)
        store = PrefixStore(name, self._store)
        self._group: Any
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            address = own_address(host, port)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
        else:
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, size, nccl_options)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send named tensors, as number 0. Raises RuntimeError if a member has gone."""
        whole = [tensor.detach().to(self.device).contiguous() for _, tensor in tensors]
        for first, end in self._buffers([tensor.nbytes for tensor in whole]):
            if self.packed_bytes:
                flat = [each.reshape(-1).view(torch.uint8) for each in whole[first:end]]
                self._broadcast(torch.cat(flat))
            else:
                self._broadcast(whole[first])

    def receive(
        self, tensors: Sequence[tuple[str, Sequence[int], torch.dtype]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what number 0 sends: name, shape and type of each, in its order. Raises
        RuntimeError if it has gone."""
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in tensors]
        for first, end in self._buffers(sizes):
            if not self.packed_bytes:
                name, shape, dtype = tensors[first]
                tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
                self._broadcast(tensor)
                yield name, tensor
                continue
            buffer = torch.empty(sum(sizes[first:end]), dtype=torch.uint8, device=self.device)
            self._broadcast(buffer)
            begin = 0
            for (name, shape, dtype), size in zip(
                tensors[first:end], sizes[first:end], strict=True
            ):
                # A copy: the bytes of another type may begin anywhere.
                own = buffer[begin : begin + size].clone()
                yield name, own.view(dtype).view(tuple(shape))
                begin += size

    def _buffers(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of the tensors that travel together: as many as fit, at least one."""
        first, total = 0, 0
        for count, size in enumerate(sizes):
            if count > first and total + size > self.packed_bytes:
                yield first, count
                first, total = count, 0
            total += size
        if sizes:
            yield first, len(sizes)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all others, or let it be filled by number 0's. Waits."""
        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()

    def close(self) -> None:
        """Leave."""
        self._group = self._store = None  # type: ignore[assignment]
