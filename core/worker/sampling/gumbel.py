"""Counter-based noise for sampling: a pure function of (seed, position, token id).

Without generator state, a request draws the same in any batch, and after preemption. The mixing
steps are multiply and xor-shift, as in the finaliser of MurmurHash3 (Appleby) and SplitMix64
(Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import sys

import numpy as np
import torch

NUM_LANES = 3
"""32-bit words that a seed expands to."""

_MASK64 = (1 << 64) - 1
_LOW = 0 if sys.byteorder == "little" else 1

# Odd constants with well-distributed bits, as signed 32-bit numbers.
_POSITION_STEPS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_MIX = (0x85EBCA6B, 0xC2B2AE35)

# Maps int32 x to |x + 0.5| * _SCALE in [2^-32, 1 - 2^-23]: never 0, never 1. The sign carries the
# top bit, so small values, which decide the maximum, keep full relative precision.
_SCALE = 2.0**-31 * (1.0 - 2.0**-23)


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def seed_lanes(seed: int) -> np.ndarray:
    """Expand a 64-bit seed to [NUM_LANES] int32 of mixed bits."""
    first = _splitmix64(seed & _MASK64)
    second = _splitmix64(first)
    words = (first & 0xFFFFFFFF, first >> 32, second & 0xFFFFFFFF)
    return np.array(words, dtype=np.uint32).view(np.int32)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _fold_halves(x: torch.Tensor) -> None:
    """x ^= x >>> 16, in place and in one pass."""
    halves = x.view(torch.int16)
    halves[..., _LOW::2].bitwise_xor_(halves[..., 1 - _LOW :: 2])


def _mix(x: torch.Tensor) -> None:
    _fold_halves(x)
    for constant in _MIX:
        x.mul_(_signed(constant))
        _fold_halves(x)


class TokenNoise:
    """Exponential noise E(seed, position, token) with mean 1; `-log(E)` is Gumbel noise. Integer
    arithmetic wraps at 32 bits on every device.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        hashes = np.arange(vocab_size, dtype=np.int32)
        self._token_hashes = torch.from_numpy(hashes)
        _mix(self._token_hashes.add_(_signed(0x9E3779B9)))
        self._token_hashes = self._token_hashes.to(device)
        steps = [_signed(step) for step in _POSITION_STEPS]
        self._steps = torch.tensor([steps], dtype=torch.int32).to(device)
        self._odd = torch.tensor([[0, 1, 1]], dtype=torch.int32).to(device)
        self._offset = torch.tensor(0.5 * _SCALE, dtype=torch.float32).to(device)

    def row_keys(self, lanes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """lanes: [R, NUM_LANES] int32 (`seed_lanes`); positions: [R] int → keys [R, NUM_LANES]."""
        column = positions.to(torch.int32).unsqueeze(1)
        keys = torch.addcmul(lanes, column, self._steps)
        _mix(keys)
        return keys.bitwise_or_(self._odd)

    def exponential(
        self,
        keys: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        *,
        own: slice = slice(None),
    ) -> torch.Tensor:
        """keys: [R, NUM_LANES]; token_ids: [R, K] int64, None: those of `own`, by default all → [R,
        K] float32 in [2^-32, 16]. Seven passes over the result.
        """
        if token_ids is None:
            hashes = self._token_hashes[own].unsqueeze(0)
        else:
            hashes = self._token_hashes.take(token_ids)
        x = torch.addcmul(keys[:, 0:1], hashes, keys[:, 1:2])
        _fold_halves(x)
        x.mul_(keys[:, 2:3])
        _fold_halves(x)
        noise = torch.add(self._offset, x, alpha=_SCALE)
        noise.copysign_(-1.0)
        return torch.special.xlog1py(-1.0, noise)
