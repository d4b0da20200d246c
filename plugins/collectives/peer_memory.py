"""Collectives of GPUs of one host that write into each other's memory; NCCL for what is large.

In decode a layer's sum is small (8 kB per token of an 8B model), and a library's call mostly waits.
`kernels/peer_sum.py` adds such terms, and the residual, in one launch.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from pathlib import Path

import msgspec
import torch

from ...core.errors import ConfigError
from ...core.protocols.collectives import CollectivesSetup
from ...kernels.peer_sum import DTYPES, Mailboxes, Way, mailbox_words, peer_sum
from .builtin import Nccl
from .shared_memory import SharedMemory

logger = logging.getLogger("jackfield.worker")
TOKEN = secrets.token_hex(8)
"""Identifies this process and its forks."""

WAYS: dict[int, tuple[tuple[int, Way], ...]] = {
    2: ((512 << 10, "words"), (2 << 20, "one_shot"), (16 << 20, "two_shot")),
    4: ((128 << 10, "words"), (512 << 10, "one_shot"), (16 << 20, "two_shot")),
    8: ((64 << 10, "words"), (256 << 10, "one_shot"), (16 << 20, "two_shot")),
}
"""Most ranks → largest terms in bytes, and their way of addition. Larger terms go through NCCL."""


class Address(msgspec.Struct, frozen=True):
    """Location of a rank's mailbox, for other ranks."""

    host: str
    process: str
    device: int
    """Device number in that process."""
    pointer: int
    """Valid in that process."""
    handle: bytes


class PeerMemory(Nccl):
    """For CUDA devices that can access each other's memory."""

    @staticmethod
    def supports(device: torch.device) -> str | None:
        if (reason := Nccl.supports(device)) is not None:
            return reason
        count = torch.cuda.device_count()
        reach = all(
            torch.cuda.can_device_access_peer(one, other)
            for one in range(count)
            for other in range(count)
            if one != other
        )
        return None if count > 1 and reach else "the GPUs cannot reach each other's memory"

    def __init__(self, setup: CollectivesSetup) -> None:
        self._mailboxes: Mailboxes | None = None
        super().__init__(setup)
        try:
            self._mailboxes = self._open(setup)
        except RuntimeError as error:
            raise ConfigError(
                f"collectives: rank {setup.rank} of {setup.size} cannot share memory of its GPU "
                f"with the others ({error}); set collectives=nccl to go without",
                param="collectives",
            ) from error
        ways = [WAYS[size] for size in sorted(WAYS) if size >= setup.size]
        self._ways = ways[0] if ways else ()

    def _open(self, setup: CollectivesSetup) -> Mailboxes | None:
        """Return the mailboxes of all ranks; None if ranks are on several hosts."""
        device, host = setup.device, _host()
        own = self._memory = SharedMemory(device, 8 * mailbox_words(setup.size))
        address = Address(host, _process(), device.index or 0, own.pointer, own.handle())
        encoded = msgspec.msgpack.encode(address)
        self._store.set(f"mailbox/{setup.rank}", encoded)  # type: ignore[arg-type]
        addresses = [
            msgspec.msgpack.decode(self._store.get(f"mailbox/{rank}"), type=Address)
            for rank in range(setup.size)
        ]
        if any(other.host != host for other in addresses):
            logger.info("ranks are on several hosts: NCCL alone adds what they have")
            return None
        pointers = [
            own.pointer if rank == setup.rank else self._pointer(other, device)
            for rank, other in enumerate(addresses)
        ]
        # No rank writes before every rank has opened all.
        self.all_reduce(torch.zeros(1, device=device)).item()
        return Mailboxes.at(setup.rank, pointers, device)

    def _pointer(self, address: Address, device: torch.device) -> int:
        """Return the address of another rank's mailbox for this process and device."""
        if address.process == _process():
            # A copy makes torch give the two devices access to each other.
            torch.empty(1, device=device).copy_(torch.empty(1, device=f"cuda:{address.device}"))
            return address.pointer
        return self._memory.open(address.handle)

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        boxes = self._mailboxes
        num_bytes = x.numel() * x.element_size()
        alike = residual is None or residual.dtype == x.dtype
        if boxes is not None and x.dtype in DTYPES and alike and num_bytes % 4 == 0:
            for largest, way in self._ways:
                if num_bytes <= largest:
                    return peer_sum(x, residual, boxes, way)
        return super().all_reduce(x, residual)

    def close(self) -> None:
        """Close as NCCL does, after all waiting for mail has ended."""
        if self._mailboxes is not None:
            self._mailboxes.give_up()
        super().close()
        self._memory.close()


def _process() -> str:
    """Identify this process on its host: in another container, a process may have its number."""
    return f"{os.getpid()} {TOKEN}"


def _host() -> str:
    """Identify this host: another may have its name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
