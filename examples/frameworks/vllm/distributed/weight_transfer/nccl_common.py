"""The trainer's end of a weight transfer."""

from __future__ import annotations

from typing import Any

import torch

from jackfield.core.parallel.broadcast import BroadcastGroup

PACKED_BYTES = 1 << 30


class Communicator:
    """Number 0 of the group that an engine joins at `POST /init_weight_transfer_engine`."""

    def __init__(self, group: BroadcastGroup) -> None:
        self.group = group


def trainer_init(init_info: Any, rank: int = 0) -> Communicator:
    """Open the group, and wait for the engine's ranks: by NCCL on a CUDA device, else by gloo.

    init_info: what `POST /init_weight_transfer_engine` is given, as a dict or with attributes.
    """
    if not isinstance(init_info, dict):
        init_info = vars(init_info)
    packed_bytes = init_info.get("packed_buffer_size_bytes", PACKED_BYTES)
    if not init_info.get("packed"):
        packed_bytes = 0
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    group = BroadcastGroup(
        init_info["master_address"],
        init_info["master_port"],
        rank,
        init_info["world_size"],
        device,
        packed_bytes=packed_bytes,
        rendezvous="vllm",
    )
    return Communicator(group)
