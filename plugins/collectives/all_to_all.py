"""All-to-all over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch

from ...core.protocols.all2all import All2AllSetup, Dispatched
from .builtin import Gloo, Nccl

NOWHERE = -1
"""Stands for an expert in padding rows."""


class Sent(NamedTuple):
    """The exchange of tokens between this rank and the others."""

    tokens: torch.Tensor
    """[M] int64: own token of each sent row, by rank."""
    counts: list[int]
    """Rows sent to each rank."""
    received: list[int]
    """Rows received from each."""
    num_tokens: int


class Gathered(NamedTuple):
    """All ranks' tokens were gathered."""

    capacity: int
    num_tokens: int


class AllToAll:
    """Each token goes once to each rank that has an expert of it, as bytes: its state, experts and
    weights.

    Without counts, which the host would have to wait for, rows for all tokens go to all ranks: on a
    GPU, and where most tokens have experts on most ranks anyway, because they choose as many
    experts as there are ranks.
    """

    recordable: ClassVar[bool] = True

    def __init__(self, setup: All2AllSetup) -> None:
        self._group = (Gloo if setup.device.type == "cpu" else Nccl)(setup)
        self.rank, self.size = self._group.rank, self._group.size

    @staticmethod
    def supports(device: torch.device) -> str | None:
        """Needs a CPU or CUDA."""
        library = Gloo if device.type == "cpu" else Nccl
        return library.supports(device)

    def dispatch(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        *,
        num_local_experts: int,
        capacity: int,
    ) -> Dispatched:
        """One exchange of rows, and with counts one of those before it."""
        top_k = experts.shape[1]
        parts = (x, experts.int(), weights.float())
        rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        handle: Sent | Gathered
        if x.device.type != "cpu" or top_k >= self.size:
            received, handle = self._to_all(rows, parts, capacity)
        else:
            received, handle = self._to_some(rows, experts // num_local_experts)
        sizes = [part.shape[1] * part.element_size() for part in parts]
        came, chosen, factors = (
            piece.contiguous().view(part.dtype)
            for piece, part in zip(torch.split(received, sizes, dim=1), parts, strict=True)
        )
        local = torch.where(chosen < 0, NOWHERE, chosen - self.rank * num_local_experts)
        return Dispatched(came, local.int(), factors, handle)

    def _to_all(
        self, rows: torch.Tensor, parts: tuple[torch.Tensor, ...], capacity: int
    ) -> tuple[torch.Tensor, Gathered]:
        """Return [size * capacity, bytes of a row]."""
        num_tokens, start = len(rows), parts[0].shape[1] * parts[0].element_size()
        filled = rows.new_zeros(capacity, rows.shape[1])
        filled[:num_tokens] = rows
        # Each byte of a number that is -1.
        filled[num_tokens:, start : start + 4 * parts[1].shape[1]] = 255
        gathered = self._group.all_gather(filled.view(1, -1)).view(-1, rows.shape[1])
        return gathered, Gathered(capacity, num_tokens)

    def _to_some(self, rows: torch.Tensor, owners: torch.Tensor) -> tuple[torch.Tensor, Sent]:
        """Return [sum of the counts of all ranks, bytes of a row]. owners: [n, top_k], by rank."""
        goes = torch.zeros(len(rows), self.size, dtype=torch.bool, device=rows.device)
        goes.scatter_(1, owners.long(), True)
        tokens = goes.t().nonzero()[:, 1]
        counts = goes.sum(dim=0)
        ones = [1] * self.size
        received = self._group.all_to_all(counts, ones, ones).tolist()
        handle = Sent(tokens, counts.tolist(), received, len(rows))
        return self._group.all_to_all(rows[tokens], handle.counts, received), handle

    def combine(self, out: torch.Tensor, handle: Any) -> torch.Tensor:
        """Add in float32, in the order of ranks."""
        if isinstance(handle, Gathered):
            each = [handle.capacity] * self.size
            back = self._group.all_to_all(out, each, each).view(self.size, -1, out.shape[1])
            return back[:, : handle.num_tokens].float().sum(dim=0).to(out.dtype)
        back = self._group.all_to_all(out, handle.received, handle.counts)
        total = torch.zeros(handle.num_tokens, out.shape[1], device=out.device)
        return total.index_add_(0, handle.tokens, back.float()).to(out.dtype)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()
