"""Tensors joined in buffers of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .nccl_common import Communicator

Named = tuple[str, torch.Tensor]


def packed_nccl_broadcast_producer(
    iterator: Iterator[Named],
    group: Communicator,
    src: int,
    post_iter_func: Callable[[Named], torch.Tensor],
) -> None:
    """Send tensors to the engine's ranks. src: 0, always."""
    group.group.send((item[0], post_iter_func(item)) for item in iterator)
