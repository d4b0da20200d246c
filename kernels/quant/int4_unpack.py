"""4-bit numbers of int32 words as float16 or bfloat16, in about one instruction per number.

A number in the lowest bits of a float's fraction needs no conversion: with the right exponent it
reads as `int4_base` + number. Two words at a time fill both halves of each register, so that one
instruction converts two numbers. The base is subtracted afterwards, from numbers or from sums.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from .quantized_weight import QuantizedWeight, largest_tile

PACK_FACTOR = 8


@triton.constexpr_function
def int4_base(dtype):
    """Return the base that `unpack_int4` adds to numbers; there the type's floats are 1 apart."""
    return 128 if dtype == tl.bfloat16 else 1024


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def unpack_int4(words, dtype: tl.constexpr):
        """int32 words → their 8 numbers from the low bits on, each + int4_base(dtype)."""
        BASE: tl.constexpr = int4_base(dtype)
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
    def subtract_pairs(left, right):
        return left - right

    @triton.jit
    def multiply_pairs(left, right):
        return left * right

else:

    def _instructions(exponents: str) -> tl.constexpr:
        """Return PTX for two words: pair their halves, shift, mask and set the exponents."""
        lines = [".reg .b32 low, high, moved;"]
        lines += ["prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
        for part in range(PACK_FACTOR):
            half, shift = ("low", "high")[part // 4], 4 * (part % 4)
            if shift:
                lines.append(f"shr.u32 moved, {half}, {shift};")
                half = "moved"
            lines.append(f"lop3.b32 ${part}, {half}, 0x000f000f, {exponents}, 0xea;")
        return tl.constexpr("{" + " ".join(lines) + "}")

    _BFLOAT16, _FLOAT16 = _instructions("0x43004300"), _instructions("0x64006400")
    _REGISTERS = tl.constexpr(",".join(["=r"] * PACK_FACTOR + ["r", "r"]))

    @triton.jit
    def unpack_int4(words, dtype: tl.constexpr):
        """Do the same, two words at once: one instruction per number."""
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
    def subtract_pairs(left, right):
        """left - right, two elements per instruction, which the compiler would split."""
        TYPE: tl.constexpr = "bf16x2" if left.dtype == tl.bfloat16 else "f16x2"
        return tl.inline_asm_elementwise(
            "sub.rn." + TYPE + " $0, $1, $2;", "=r,r,r", [left, right],
            dtype=left.dtype, is_pure=True, pack=2,
        )  # fmt: skip

    @triton.jit
    def multiply_pairs(left, right):
        """left * right, two elements per instruction."""
        TYPE: tl.constexpr = "bf16x2" if left.dtype == tl.bfloat16 else "f16x2"
        return tl.inline_asm_elementwise(
            "mul.rn." + TYPE + " $0, $1, $2;", "=r,r,r", [left, right],
            dtype=left.dtype, is_pure=True, pack=2,
        )  # fmt: skip


def int4_tile(weight: QuantizedWeight, limit: int) -> int:
    """Return the words of a row per tile: a power of two up to `limit` that divides the row, with
    one scale per part (for floats, a run). 0: too few for a tensor core, or not 4 bits.
    """
    if weight.pack_factor != PACK_FACTOR or weight.scale_rows > 1:
        return 0
    width = int(weight.values.shape[1])
    if weight.e2m1_run is not None:
        return 0 if width % weight.e2m1_run else weight.e2m1_run
    tile = min(largest_tile(weight, limit), width & -width)
    return tile if tile >= 16 else 0
