"""Counter-based random numbers: a hash of (seed, position, token) instead of a generator's state.

So a request's draw depends on nothing but itself: not on the batch, not on its row, not on whether
it was preempted in between. Hash: the 32-bit finaliser "lowbias32" of C. Wellons (public domain).
"""

from __future__ import annotations

import torch

_GOLDEN = -1640531527  # 0x9E3779B9 as int32
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = -2073254261  # 0x846CA68B as int32


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16)) * _MULTIPLY_1
    x = (x ^ _shift(x, 15)) * _MULTIPLY_2
    return x ^ _shift(x, 16)


def _low(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64, as int32."""
    x = x & 0xFFFFFFFF
    return torch.where(x > 0x7FFFFFFF, x - (1 << 32), x).int()


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise, [R, V]. seeds, positions: [R] int64; token_ids: [V] or [R, V]."""
    low, high, position = _low(seeds), _low(seeds >> 32), position_key(positions)
    first = _mix(_mix(low) + position)
    second = _mix(_mix(high ^ _GOLDEN) ^ _mix(first + position))
    x = _mix((token_ids.int() * _GOLDEN) ^ first[:, None])
    x = _mix(x + second[:, None])
    uniform = (_shift(x, 8).float() + 0.5) * (1.0 / (1 << 24))
    return -torch.log(-torch.log(uniform))


def position_key(positions: torch.Tensor) -> torch.Tensor:
    """Positions spread over 32 bits. [R] → [R] int32"""
    return _mix(_low(positions) * _GOLDEN + 1)
