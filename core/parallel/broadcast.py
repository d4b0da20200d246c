"""A `torch.distributed` group in which number 0 sends tensors to all others.

Beside the groups in which an engine computes, and torch's global ones: a trainer and the ranks of
an engine join it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]

from .join import own_address
from .nccl import NcclGroup, agree_on_id

T = TypeVar("T")
Announced: TypeAlias = tuple[str, Sequence[int], torch.dtype]
"""Name, shape and type of a tensor that will be sent."""


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
        rendezvous: str = "torch",
        unique_id: bytes = b"",
    ) -> None:
        """host, port: where number 0 listens. name: of the group; all say the same. backend: "nccl"
        or "gloo"; "": by the device. packed_bytes: more than 0: tensors travel joined in buffers of
        bytes, each of which ends with the tensor that makes it longer than this; all say the same.
        rendezvous: with NCCL, "torch" or "vllm": whose groups the others join by. unique_id: NCCL's
        number of the group, in place of host and port.
        """
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        if backend not in ("nccl", "gloo"):
            raise ValueError(f"backend: must be nccl or gloo, got {backend!r}")
        if unique_id and backend != "nccl":
            raise ValueError("NCCL's number of a group is given, and this group is one of gloo")
        self.rank, self.size, self.packed_bytes = rank, size, packed_bytes
        self.device = device if backend == "nccl" else torch.device("cpu")
        """Where tensors are sent from and received to."""
        self._store: Any = None
        self._group: Any
        if backend == "nccl" and (unique_id or rendezvous == "vllm"):
            if not unique_id:
                unique_id, self._store = agree_on_id(host, port, rank, size, timeout)
            self._group = NcclGroup(unique_id, rank, size, self.device, timeout)
        else:
            self._group = self._torch_group(host, port, name, backend, timeout)

    def _torch_group(self, host: str, port: int, name: str, backend: str, timeout: float) -> Any:
        limit = timedelta(seconds=timeout)
        rank, size = self.rank, self.size
        self._store = TCPStore(host, port, size, is_master=rank == 0, timeout=limit)
        # As torch's own groups do, so that a trainer may join by one of those.
        kind = "cuda" if backend == "nccl" else "cpu"
        store = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
        if backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            address = own_address(host, port)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            return dist.ProcessGroupGloo(store, rank, size, options)
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, nccl_options)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send named tensors, as number 0. Raises RuntimeError if a member has gone."""
        own = (tensor.detach().to(self.device).contiguous() for _, tensor in tensors)
        for together in self._buffers(own, lambda tensor: tensor.nbytes):
            if self.packed_bytes:
                flat = [tensor.reshape(-1).view(torch.uint8) for tensor in together]
                self._broadcast(torch.cat(flat))
            else:
                self._broadcast(together[0])

    def receive(self, tensors: Iterable[Announced]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what number 0 sends: name, shape and type of each, in its order. Raises
        RuntimeError if it has gone."""
        for together in self._buffers(tensors, _nbytes):
            if not self.packed_bytes:
                [(name, shape, dtype)] = together
                tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
                self._broadcast(tensor)
                yield name, tensor
                continue
            sizes = [_nbytes(each) for each in together]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self._broadcast(buffer)
            for (name, shape, dtype), piece in zip(together, buffer.split(sizes), strict=True):
                # A copy: the bytes of another type may begin anywhere.
                yield name, piece.clone().view(dtype).view(tuple(shape))

    def _buffers(self, items: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
        """Yield the tensors that travel together."""
        together: list[T] = []
        total = 0
        for item in items:
            together.append(item)
            total += nbytes(item)
            if total > self.packed_bytes or not self.packed_bytes:
                yield together
                together, total = [], 0
        if together:
            yield together

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all others, or let it be filled by number 0's. Waits."""
        if isinstance(self._group, NcclGroup):
            self._group.broadcast(tensor)
            return
        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()

    def close(self) -> None:
        """Leave."""
        if isinstance(self._group, NcclGroup):
            self._group.close()
        self._group = self._store = None


def _nbytes(announced: Announced) -> int:
    _, shape, dtype = announced
    return torch.Size(shape).numel() * dtype.itemsize
