"""4-bit numbers out of words, as what the matrix unit takes: one instruction a number, or less.

A number in the lowest bits of a float's fraction needs no conversion: with the right exponent it
reads as BASE + number. Two words give the halves of two registers their numbers, so an instruction
handles two of them. BASE is taken off afterwards, from sums or from the numbers.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import os

import triton
import triton.language as tl

from .packed_weight import Packed, largest_tile

PARTS = 8
"""Numbers to a word."""


@triton.constexpr_function
def base_of(dtype):
    """What `numbers` adds to each: where the type's fraction has steps of one."""
    return 128 if dtype == tl.bfloat16 else 1024


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def numbers(words, dtype: tl.constexpr):
        """Of int32 words → their 8 numbers from the low bits on, each + base_of(dtype)."""
        BASE: tl.constexpr = base_of(dtype)
        return (
            ((words & 15) + BASE).to(dtype),
            (((words >> 4) & 15) + BASE).to(dtype),
            (((words >> 8) & 15) + BASE).to(dtype),
            (((words >> 12) & 15) + BASE).to(dtype),
            (((words >> 16) & 15) + BASE).to(dtype),
            (((words >> 20) & 15) + BASE).to(dtype),
            (((words >> 24) & 15) + BASE).to(dtype),
            (((words >> 28) & 15) + BASE).to(dtype),
        )

    @triton.jit
    def minus(left, right):
        """left - right, both of one 16-bit type."""
        return left - right

    @triton.jit
    def times(left, right):
        """left * right, both of one 16-bit type."""
        return left * right

else:

    def _instructions(exponents: str) -> tl.constexpr:
        """Of two words: pair their halves, shift, mask and set the exponents."""
        lines = [".reg .b32 low, high, moved;"]
        lines += ["prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
        for part in range(PARTS):
            half, shift = ("low", "high")[part // 4], 4 * (part % 4)
            if shift:
                lines.append(f"shr.u32 moved, {half}, {shift};")
                half = "moved"
            lines.append(f"lop3.b32 ${part}, {half}, 0x000f000f, {exponents}, 0xea;")
        return tl.constexpr("{" + " ".join(lines) + "}")

    _BFLOAT16, _FLOAT16 = _instructions("0x43004300"), _instructions("0x64006400")
    _REGISTERS = tl.constexpr(",".join(["=r"] * PARTS + ["r", "r"]))

    @triton.jit
    def numbers(words, dtype: tl.constexpr):
        """The same for two words at once: an instruction a number."""
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _BFLOAT16, _REGISTERS, [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                       tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=2,
            )  # fmt: skip
        else:
            tl.static_assert(dtype == tl.float16)
            return tl.inline_asm_elementwise(
                _FLOAT16, _REGISTERS, [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                       tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True, pack=2,
            )  # fmt: skip

    @triton.jit
    def minus(left, right):
        """Two at once: the compiler would take them apart."""
        TYPE: tl.constexpr = "bf16x2" if left.dtype == tl.bfloat16 else "f16x2"
        return tl.inline_asm_elementwise(
            "sub.rn." + TYPE + " $0, $1, $2;", "=r,r,r", [left, right],
            dtype=left.dtype, is_pure=True, pack=2,
        )  # fmt: skip

    @triton.jit
    def times(left, right):
        """Two at once."""
        TYPE: tl.constexpr = "bf16x2" if left.dtype == tl.bfloat16 else "f16x2"
        return tl.inline_asm_elementwise(
            "mul.rn." + TYPE + " $0, $1, $2;", "=r,r,r", [left, right],
            dtype=left.dtype, is_pure=True, pack=2,
        )  # fmt: skip


def run_of_words(weight: Packed, wanted: int) -> int:
    """Words of a row to take at a time: a power of two up to `wanted` that divides the row, and
    whose numbers share a scale part by part. 0: fewer than the matrix unit takes, or not 4 bits."""
    if weight.parts != PARTS or weight.scale_rows > 1:
        return 0
    width = int(weight.values.shape[1])
    run = min(largest_tile(weight, wanted), width & -width)
    return run if run >= 16 else 0
