"""A convolution's step of one token per row, for kernels that keep its outputs in registers.

Each kernel reads the kept inputs, and stores them shifted by one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept_inputs(
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    channel,
    inside,
    continues,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Return the sum of what the kept inputs add, the weight of the new one, and the kept inputs.

    inputs_ptr: a row's [TAPS - 1, SIZE], zeros unless it `continues`; weight_ptr: [SIZE, TAPS]
    """
    total = tl.zeros(channel.shape, tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    kept = ()
    for tap in tl.static_range(TAPS - 1):
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=inside, other=0.0)
        old = tl.load(inputs_ptr + tap * SIZE + channel, mask=inside & continues, other=0.0)
        total += weight.to(tl.float32) * old.to(tl.float32)
        kept = kept + (old,)  # type: ignore[assignment]  # noqa: RUF005
    last = tl.load(weight_ptr + channel * TAPS + TAPS - 1, mask=inside, other=0.0)
    return total, last.to(tl.float32), kept


@triton.jit
def convolved(total, last, new):
    total += last * new.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def store_inputs(
    inputs_ptr, kept, new, channel, inside, SIZE: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """Store the kept inputs but the first, and the new one."""
    for tap in tl.static_range(TAPS - 2):
        tl.store(inputs_ptr + tap * SIZE + channel, kept[tap + 1], mask=inside)
    target = inputs_ptr + (TAPS - 2) * SIZE + channel
    tl.store(target, new.to(inputs_ptr.dtype.element_ty), mask=inside)
