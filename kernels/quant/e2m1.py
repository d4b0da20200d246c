"""Words of 4-bit floats (e2m1) as floats that are too small by a power of two, `e2m1_unit`.

A magnitude's three bits, moved to the lowest two bits of a float's exponent and the highest of its
fraction, read as that magnitude times 2 ** (1 - bias): also 0 and 0.5, as subnormal numbers. One
multiplication mends that, the one by the scale, where there is one.

Half a word holds the magnitudes of four parts in its low 12 bits, and then the signs of parts 1, 3,
0 and 2. In bfloat16 and float32, parts 1 and 2 need one shift for both, the others two.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

SIGNS = (14, 12, 15, 13)
"""Sign bit of each part in half a word."""


@triton.constexpr_function
def e2m1_unit(dtype):
    """Return the divisor in `unpack_e2m1` and `part_as_e2m1`."""
    return 2.0**14 if dtype == tl.float16 else 2.0**126


@triton.constexpr_function
def _shifts(part):
    """Return the left shifts of a part's magnitude and sign into a float32."""
    half, place = 16 * (part // 4), part % 4
    return 22 - half - 3 * place, 31 - half - SIGNS[place]


@triton.jit
def _moved(words, LEFT: tl.constexpr):
    if LEFT >= 0:
        return words << LEFT
    else:
        return words >> (-LEFT)


@triton.jit
def part_as_e2m1(words, PART: tl.constexpr):
    """Return part PART of each int32 word as float32, divided by `e2m1_unit`."""
    MAGNITUDE: tl.constexpr = _shifts(PART)[0]
    SIGN: tl.constexpr = _shifts(PART)[1]
    # -0x80000000 is the sign's bit, 0x01C00000 are the magnitude's.
    if MAGNITUDE == SIGN:
        bits = _moved(words, SIGN) & -0x7E400000
    else:
        bits = (_moved(words, MAGNITUDE) & 0x01C00000) | (_moved(words, SIGN) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


def _instructions(lowest: int) -> tuple[tl.constexpr, ...]:
    """Return PTX that moves and masks the bits of each part of half a word, two at a time.
    lowest: bit of a 16-bit float to which a magnitude's lowest bit goes."""
    magnitudes = 0x00070007 << lowest
    parts = []
    for part in range(4):
        left, sign_left = lowest - 3 * part, 15 - SIGNS[part]
        shift = f"shl.b32 size, $1, {left};" if left >= 0 else f"shr.u32 size, $1, {-left};"
        if left == sign_left:
            lines = [shift, f"and.b32 $0, size, {magnitudes | 0x80008000:#010x};"]
        else:
            lines = [shift, f"and.b32 size, size, {magnitudes:#010x};"]
            lines.append(f"shl.b32 sign, $1, {sign_left};")
            lines.append("lop3.b32 $0, sign, 0x80008000, size, 0xea;")
        parts.append(tl.constexpr("{.reg .b32 size, sign; " + " ".join(lines) + "}"))
    return tuple(parts)


_BFLOAT16, _FLOAT16 = _instructions(6), _instructions(9)
_HALVES = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


@triton.constexpr_function
def _instruction(part, dtype):
    return (_BFLOAT16 if dtype == tl.bfloat16 else _FLOAT16)[part % 4].value


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def split_e2m1(words):
        return words.to(tl.int16), (words >> 16).to(tl.int16)

    @triton.jit
    def unpack_e2m1(halves, PART: tl.constexpr, dtype: tl.constexpr):
        """Return part PART of words from `split_e2m1` as 16-bit floats, over `e2m1_unit`."""
        WIDER: tl.constexpr = e2m1_unit(tl.float32) / e2m1_unit(dtype)
        return (part_as_e2m1(halves[PART // 4].to(tl.int32), PART % 4) * WIDER).to(dtype)

else:

    @triton.jit
    def split_e2m1(words):
        """Do the same, two words at once."""
        return tl.inline_asm_elementwise(
            _HALVES, "=r,=r,r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
        )

    @triton.jit
    def unpack_e2m1(halves, PART: tl.constexpr, dtype: tl.constexpr):
        """Do the same, two numbers at once. Apart from the halves, so that a product's part is
        unpacked just before it: with all eight, a tile would not fit the registers."""
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _instruction(PART, dtype), "=r,r", [halves[PART // 4]], dtype=tl.bfloat16,
                is_pure=True, pack=2,
            )  # fmt: skip
        else:
            tl.static_assert(dtype == tl.float16)
            return tl.inline_asm_elementwise(
                _instruction(PART, dtype), "=r,r", [halves[PART // 4]], dtype=tl.float16,
                is_pure=True, pack=2,
            )  # fmt: skip
