"""What gated layers make of a gate and of what it lets through, both in float32, for kernels."""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Clamp(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate), gate cut off above limit, up at both sides."""

    alpha: float
    limit: float


@triton.jit
def gated_product(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """silu(gate) * up, or, with ALPHA, as `Clamp` says. What is no number stays none."""
    if ALPHA is None:
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
