"""Numbers of 8 bits as bfloat16.

Left to itself, ptxas rounds float32 to bfloat16 one by one where they were fp8 before, by a
conversion of which a multiprocessor does few per clock. Two at once take one usual instruction.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def round_pairs(x, dtype: tl.constexpr):
        return x.to(dtype)

else:

    @triton.jit
    def round_pairs(x, dtype: tl.constexpr):
        """float32 → the nearest numbers of `dtype`, two at once where ptxas would not, too."""
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return x.to(dtype)


@triton.jit
def widen_tile(tile, dtype: tl.constexpr):
    if tile.dtype.is_fp8() and dtype == tl.bfloat16:
        return round_pairs(tile.to(tl.float32), dtype)
    else:
        return tile.to(dtype)
