"""A cache of `transformers` that rounds keys and values as a quantized one of ours stores them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

FP8 = torch.float8_e4m3fn
STEPS = {8: (127.0, 0.0), 4: (7.5, 0.5)}
"""Bits → steps on each side of the middle; where the codes are between two steps."""


FORMATS = {"int8": (8, 8), "int8_int4": (8, 4), "int4": (4, 4), "fp8": (FP8, FP8)}
"""Name of a cache's format → how keys and values are rounded."""


def rounded(x: torch.Tensor, bits: int | torch.dtype) -> torch.Tensor:
    """Round x, [..., head_dim], to the steps of its own range, in float64 but for what is stored;
    or to a type."""
    if isinstance(bits, torch.dtype):
        return x.to(bits).to(x.dtype)
    wide = x.double()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    middle = ((low + high) / 2).bfloat16().double()
    most, shift = STEPS[bits]
    step = torch.maximum(high - middle, middle - low) / most
    near = step.bfloat16()
    up = torch.nextafter(near, torch.full_like(near, torch.inf))
    step = torch.where(near.double() < step, up, near).double()
    codes = torch.floor((wide - middle) / step + shift + 0.5) - shift
    return torch.where(step > 0, middle + codes * step, middle).to(x.dtype)


class RoundedCache(DynamicCache):
    """Rounds before it stores, so that attention, too, sees what is rounded."""

    def __init__(self, name: str, skipped: tuple[int, ...] = ()) -> None:
        """skipped: layers whose keys and values are exact"""
        super().__init__()
        self.bits = FORMATS[name]
        self.skipped = skipped

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **more: Any
    ) -> Any:
        if layer not in self.skipped:
            key, value = rounded(key, self.bits[0]), rounded(value, self.bits[1])
        return super().update(key, value, layer, *args, **more)
