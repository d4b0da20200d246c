"""Gumbel noise on the device: the same function of (seed, position, token) as in
core/worker/sampling/gumbel.py, E(u) = -log(1 - u) with u from a hash; -log E is Gumbel.

Only explicit fused multiply-adds are fused (launch with `enable_fp_fusion=False`), so that every
kernel draws the same bits.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from .layout import LANES

# As in core/worker/sampling/gumbel.py: signed 32-bit constants of the mixing steps.
_GOLDEN = tl.constexpr(-1640531527)
_MIX_1 = tl.constexpr(-2048144789)
_MIX_2 = tl.constexpr(-1028477387)
_STEP_0 = tl.constexpr(-1640531535)
_STEP_1 = tl.constexpr(-2048144777)
_STEP_2 = tl.constexpr(-1028477379)
_SCALE = tl.constexpr(2.0**-31 * (1.0 - 2.0**-23))
_HALF_SCALE = tl.constexpr(2.0**-32 * (1.0 - 2.0**-23))
LOG2E = tl.constexpr(1.4426950408889634)


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def log2(x):
        """Compute log2 with numpy, in the interpreter."""
        return tl.log2(x)

    @triton.jit
    def largest(x):
        """Compute the maximum with numpy, in the interpreter."""
        return tl.max(tl.where(x != x, float("inf"), x), axis=0)

else:

    @triton.jit
    def log2(x):
        """One instruction. Error: 2^-22, absolute for x in (0.5, 2), otherwise relative."""
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def _larger(a, b):
        """Return the maximum; NaN if either is NaN."""
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def largest(x):
        """Return the largest of [size]; +inf if one is NaN."""
        best = tl.reduce(x, 0, _larger)
        return tl.where(best != best, float("inf"), best)


@triton.jit
def _fold(x):
    """x ^= the unsigned high half, moved down."""
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _mixed(x):
    """Mix as core/worker/sampling/gumbel.py does."""
    x = _fold(x)
    x = _fold(x * _MIX_1)
    return _fold(x * _MIX_2)


@triton.jit
def token_hashes(token):
    """Return the tokens' hashes, the same for all rows: computed once for several rows."""
    return _mixed(token + _GOLDEN)


@triton.jit
def row_keys(settings, position):
    key_0 = _mixed(tl.load(settings + LANES) + position * _STEP_0)
    key_1 = _mixed(tl.load(settings + LANES + 1) + position * _STEP_1) | 1
    key_2 = _mixed(tl.load(settings + LANES + 2) + position * _STEP_2) | 1
    return key_0, key_1, key_2


@triton.jit
def log2_exponential(hashes, key_0, key_1, key_2):
    """Return log2(E / ln 2) of tokens, from their hashes and a row's keys."""
    x = _fold(key_0 + hashes * key_1)
    x = _fold(x * key_2)
    scale = tl.full(x.shape, _SCALE, tl.float32)
    half = tl.full(x.shape, _HALF_SCALE, tl.float32)
    u = tl.abs(tl.fma(x.to(tl.float32), scale, half))
    # -log2(1 - u): by its series where that is more precise; small values decide the winner.
    inner = tl.fma(u, tl.full(x.shape, 0.2, tl.float32), tl.full(x.shape, 0.25, tl.float32))
    inner = tl.fma(u, inner, tl.full(x.shape, 1.0 / 3.0, tl.float32))
    inner = tl.fma(u, inner, tl.full(x.shape, 0.5, tl.float32))
    inner = tl.fma(u, inner, tl.full(x.shape, 1.0, tl.float32))
    return log2(tl.where(u < 0.0625, u * LOG2E * inner, -log2(1.0 - u)))


@triton.jit
def drawn_scores(scaled, factor, hashes, key_0, key_1, key_2):
    """Return base-2 scores, logits times `factor` plus noise, up to a common constant."""
    noise = log2_exponential(hashes, key_0, key_1, key_2)
    return tl.fma(scaled, tl.zeros(scaled.shape, tl.float32) + factor, -noise)
