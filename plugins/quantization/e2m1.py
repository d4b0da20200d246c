"""e2m1, the 4-bit floats of MXFP4 and NVFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives; two
to a byte, the earlier one in the low half.

The kernels for packed weights support evenly spaced integers and 8-bit floats. Every e2m1 number is
an e4m3 number, so weights are stored as e4m3: exactly, in 8 bits.
"""

from __future__ import annotations

import functools

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the low three bits; the fourth bit is the sign."""


def as_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    """[...] uint8 → [..., 2] uint8: the bits of the two numbers of each byte as e4m3."""
    pairs = _pairs().to(numbers.device)[numbers.int()]
    return pairs.view(torch.uint8).view(*numbers.shape, 2)


@functools.cache
def _pairs() -> torch.Tensor:
    """[256] int16: the two e4m3 numbers of a byte, the earlier one first in memory."""
    signed = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    numbers = signed.to(torch.float8_e4m3fn).view(torch.uint8)
    byte = torch.arange(256)
    return torch.stack([numbers[byte & 15], numbers[byte >> 4]], dim=1).view(torch.int16)[:, 0]
