"""One kernel at one shape, and what its tensors are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Work = Callable[[], object]
BLOCK_SIZE = 16
EPS = 1e-6


class Case(NamedTuple):
    kernel: str
    shape: str
    bytes: float
    """Bytes that must be read or written, each once."""
    make: Callable[[], Work]
    """Allocates tensors; returns the call on them."""
    flops: float = 0.0
    """Operations of matrix products; 0 if only bytes count."""


class Maker:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.item = device, dtype, dtype.itemsize
        self.num_sms = 8
        if device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def block_table(self, rows: int, length: int) -> torch.Tensor:
        """Return [rows, blocks] int32: each row's blocks for `length` tokens, in random order."""
        blocks = -(-length // BLOCK_SIZE)
        order = torch.randperm(rows * blocks, device=self.device, dtype=torch.int32)
        return order.view(rows, blocks)
