"""Tiles of a KV cache in attention kernels: arguments, conversions, and heads as they are stored.

A channel is zero + scale * (code - middle), with scale and zero of its token and head. The prompt
kernel, which lets many queries share a conversion, multiplies channels, rounded once to the type of
its queries, as the torch backend does. The decode kernels multiply codes: decode_codes.py.

Codes become floats by bit operations, since a multiprocessor does few conversions per clock. 8
bits: with the upper byte of 128 in bfloat16 the lower seven bits read as 128 + number, the sign bit
alone as 128 or 256, and the difference is the code. 4-bit codes are moved to where a float reads as
64 + code.

fp8 is multiplied in float16: it represents every fp8 number, and one instruction converts two;
bfloat16 takes six. Of the queries, float16 keeps all bits between 6e-5 and 65504; larger ones
become that. Weights of values are at most 1.

Keys are converted in the layout in which a product takes them. For values that layout would need
several tokens of a channel in a register, single bytes apart: they are converted as they are
loaded, and go to the product through shared memory, read transposed. Their conversion is marked so
that the compiler does not move it.
"""

from __future__ import annotations

import os
from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from ..widen import widen_tile

Quantized: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Keys, values [num_blocks, block_size, num_kv_heads, width], contiguous: int8 with a width of
head_dim, or uint8 with head_dim / 2, byte i having channel i in its low half and channel i +
head_dim / 2 in its high half; and scales [2 (keys, values), num_blocks, num_kv_heads, block_size]
int32, contiguous: a bfloat16 scale in the low half, a zero in the high half. Codes of 8 bits are
-127 .. 127 around the zero, those of 4 bits 0 .. 15 around 7.5."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FLOATS = 16
"""In place of bits: a cache of floats of any size."""


class CacheArguments(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor
    key_words: torch.Tensor | None
    """[num_blocks, num_kv_heads, block_size] int32; None: floats"""
    value_words: torch.Tensor | None
    key_bits: int
    value_bits: int
    num_kv_heads: int

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self[:4]

    @property
    def block_size(self) -> int:
        return int(self.keys.shape[1])

    @property
    def is_fp8(self) -> bool:
        return self.key_words is None and self.keys.element_size() == 1

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides of keys: of blocks, tokens and heads."""
        return self.keys.stride(0), self.keys.stride(1), self.keys.stride(2)

    def key_width(self, head_dim: int) -> int:
        return head_dim // 2 if self.key_bits == 4 else head_dim

    def value_width(self, head_dim: int) -> int:
        return head_dim // 2 if self.value_bits == 4 else head_dim

    def constants(self, head_dim: int) -> dict[str, int]:
        """Return what kernels that read any cache are compiled for."""
        return {
            "KEY_BITS": self.key_bits,
            "VALUE_BITS": self.value_bits,
            "KEY_WIDTH": self.key_width(head_dim),
            "VALUE_WIDTH": self.value_width(head_dim),
        }


def is_narrow(kv_cache: torch.Tensor | Quantized) -> bool:
    keys = kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[0]
    return keys.element_size() == 1


def cache_arguments(kv_cache: torch.Tensor | Quantized) -> CacheArguments:
    """kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim] floats, or quantized."""
    if isinstance(kv_cache, torch.Tensor):
        return CacheArguments(
            kv_cache[0], kv_cache[1], None, None, FLOATS, FLOATS, kv_cache.shape[3]
        )
    keys, values, words = kv_cache
    bits = [8 if codes.dtype == torch.int8 else 4 for codes in (keys, values)]
    return CacheArguments(keys, values, words[0], words[1], bits[0], bits[1], keys.shape[2])


def block_width(width: int) -> int:
    """Return the columns of a tile for a key or value of `width`: what a tensor core takes."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.constexpr_function
def by_bits(dtype):
    """Return whether codes become floats of `dtype` by bit operations; the interpreter converts
    instead.
    """
    return dtype.primitive_bitwidth == 16 and not INTERPRETED


@triton.constexpr_function
def code_middle(bits, dtype):
    """Return the float that the code of the zero becomes."""
    if bits == 8:
        return 0.0
    if not by_bits(dtype):
        return 7.5
    return 135.5 if dtype == tl.bfloat16 else 1031.5


@triton.constexpr_function
def product_dtype(kept, dtype):
    """Return the type of products with queries of `dtype`. kept: that of a cache of floats, or of
    codes"""
    return tl.float16 if kept.primitive_bitwidth == 8 and dtype == tl.bfloat16 else dtype


@triton.jit
def product_query(query, DTYPE: tl.constexpr):
    if query.dtype == DTYPE:
        return query
    else:
        wide = query.to(tl.float32)
        # Larger ones become the largest float16; NaN stays.
        wide = tl.where(wide > 65504.0, 65504.0, tl.where(wide < -65504.0, -65504.0, wide))
        return wide.to(DTYPE)


# $2: codes; $3, $4: scales; $5, $6: zeros. One rounding: zero + scale * code.
_DEQUANTIZE_8 = tl.constexpr(
    "{ .reg .b32 low, high, number, sign, one; mov.b32 one, 0x3f803f80;"
    " prmt.b32 low, $2, 0x43434343, 0x4140; prmt.b32 high, $2, 0x43434343, 0x4342;"
    " and.b32 number, low, 0x437f437f; lop3.b32 sign, low, 0x43804380, 0x80008000, 0xea;"
    # number * 1 + -(128 or 256): additions of bfloat16 pairs need Hopper, these Ampere.
    " fma.rn.bf16x2 number, number, one, sign; fma.rn.bf16x2 $0, number, $3, $5;"
    " and.b32 number, high, 0x437f437f; lop3.b32 sign, high, 0x43804380, 0x80008000, 0xea;"
    " fma.rn.bf16x2 number, number, one, sign; fma.rn.bf16x2 $1, number, $4, $6; }"
)
# 64 + code - 71.5: bfloat16 has no halves from 128 on.
_DEQUANTIZE_4 = tl.constexpr(
    "{ .reg .b32 low, high, number, one, middle;"
    " mov.b32 one, 0x3f803f80; mov.b32 middle, 0xc28fc28f;"
    " prmt.b32 low, $4, 0, 0x4140; prmt.b32 high, $4, 0, 0x4342;"
    " shl.b32 number, low, 1; lop3.b32 number, number, 0x001e001e, 0x42804280, 0xea;"
    " fma.rn.bf16x2 number, number, one, middle; fma.rn.bf16x2 $0, number, $5, $7;"
    " shl.b32 number, high, 1; lop3.b32 number, number, 0x001e001e, 0x42804280, 0xea;"
    " fma.rn.bf16x2 number, number, one, middle; fma.rn.bf16x2 $1, number, $6, $8;"
    " shr.u32 number, low, 3; lop3.b32 number, number, 0x001e001e, 0x42804280, 0xea;"
    " fma.rn.bf16x2 number, number, one, middle; fma.rn.bf16x2 $2, number, $5, $7;"
    " shr.u32 number, high, 3; lop3.b32 number, number, 0x001e001e, 0x42804280, 0xea;"
    " fma.rn.bf16x2 number, number, one, middle; fma.rn.bf16x2 $3, number, $6, $8; }"
)
_WIDEN_FLOAT16 = tl.constexpr(
    "{ .reg .b32 codes, low, high, base;"
    " xor.b32 codes, $2, 0x80808080; mov.b32 base, 0x64806480;"
    " prmt.b32 low, codes, 0x64646464, 0x4140; prmt.b32 high, codes, 0x64646464, 0x4342;"
    " sub.rn.f16x2 $0, low, base; sub.rn.f16x2 $1, high, base; }"
)
_UNPACK_FLOAT16 = tl.constexpr(
    "{ .reg .b32 low, high;"
    " prmt.b32 low, $4, 0x64646464, 0x4140; prmt.b32 high, $4, 0x64646464, 0x4342;"
    " and.b32 $0, low, 0x640f640f; and.b32 $1, high, 0x640f640f;"
    " shr.u32 low, low, 4; lop3.b32 $2, low, 0x000f000f, 0x64006400, 0xea;"
    " shr.u32 high, high, 4; lop3.b32 $3, high, 0x000f000f, 0x64006400, 0xea; }"
)

if INTERPRETED:

    @triton.jit
    def widen_floats(x, dtype: tl.constexpr, MOVABLE: tl.constexpr):
        return x.to(dtype)

else:
    _WIDEN_E4M3 = tl.constexpr(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    # The upper byte of a float16.
    _WIDEN_E5M2 = tl.constexpr(
        "{ .reg .b32 four; mov.b32 four, $2;"
        " prmt.b32 $0, four, 0, 0x1404; prmt.b32 $1, four, 0, 0x3424; }"
    )

    @triton.jit
    def widen_floats(x, dtype: tl.constexpr, MOVABLE: tl.constexpr):
        """Floats of a cache → the same numbers in `product_dtype`, fp8 four at a time."""
        if dtype == tl.float16 and x.dtype.primitive_bitwidth == 8:
            asm: tl.constexpr = _WIDEN_E4M3 if x.dtype == tl.float8e4nv else _WIDEN_E5M2
            return tl.inline_asm_elementwise(
                asm, "=r,=r,r", [x.to(tl.uint8, bitcast=True)],
                dtype=tl.float16, is_pure=MOVABLE, pack=4,
            )  # fmt: skip
        else:
            return widen_tile(x, dtype)


@triton.jit
def word_scale(words):
    """The lower half of each int32, as bfloat16 → float32"""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def word_zero(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def word_places(block, position, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return where these tokens' words are. block: int64, of each position."""
    return (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def dequantized(codes, words, dtype: tl.constexpr, MOVABLE: tl.constexpr, BITS: tl.constexpr):
    """[n, width] as stored, words [n] → [n, width], or [n, 2 * width] with 4 bits, rounded to
    `dtype`: the numbers of low halves, then those of high halves."""
    if dtype == tl.bfloat16:
        scale = tl.broadcast_to((words & 0xFFFF).to(tl.int16)[:, None], codes.shape)
        zero = tl.broadcast_to((words >> 16).to(tl.int16)[:, None], codes.shape)
        if BITS == 8:
            return tl.inline_asm_elementwise(
                _DEQUANTIZE_8, "=&r,=&r,r,r,r,r,r", [codes, scale, zero],
                dtype=tl.bfloat16, is_pure=MOVABLE, pack=4,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                _DEQUANTIZE_4, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, scale, zero],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=MOVABLE, pack=4,
            )  # fmt: skip
            return _beside(low, high)
    else:
        numbers = _read_codes(codes, dtype, MOVABLE, BITS).to(tl.float32) - code_middle(BITS, dtype)
        return (word_zero(words)[:, None] + word_scale(words)[:, None] * numbers).to(dtype)


@triton.jit
def _read_codes(codes, dtype: tl.constexpr, MOVABLE: tl.constexpr, BITS: tl.constexpr):
    """[n, width] as stored → [n, width], or [n, 2 * width], of `dtype`, which is not bfloat16: see
    `code_middle`."""
    if by_bits(dtype):
        if BITS == 8:
            return tl.inline_asm_elementwise(
                _WIDEN_FLOAT16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=MOVABLE, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                _UNPACK_FLOAT16, "=r,=r,=r,=r,r", [codes],
                dtype=(tl.float16, tl.float16), is_pure=MOVABLE, pack=4,
            )  # fmt: skip
            return _beside(low, high)
    elif BITS == 8:
        return codes.to(dtype)
    else:
        return _beside((codes & 15).to(dtype), (codes >> 4).to(dtype))


@triton.jit
def _beside(low, high):
    halves = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(halves, (low.shape[0], 2 * low.shape[1]))


@triton.jit
def head_words(lowest, highest, BITS: tl.constexpr):
    """Return scale, zero and word of heads whose channels lie between these, [n] float32 each.

    The zero is the middle, rounded to bfloat16; the scale reaches from there, and is rounded up.
    """
    STEPS: tl.constexpr = 127.0 if BITS == 8 else 7.5
    middle = ((lowest + highest) * 0.5).to(tl.int32, bitcast=True)
    # To the nearest bfloat16, the even one of two; the interpreter's conversion cuts off.
    zero_bits = (middle + 0x7FFF + ((middle >> 16) & 1)) & -65536
    zero = zero_bits.to(tl.float32, bitcast=True)
    reach = tl.maximum(highest - zero, zero - lowest) * (1.0 / STEPS)
    scale_bits = (reach.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    scale = scale_bits.to(tl.float32, bitcast=True)
    return scale, zero, zero_bits | (scale_bits >> 16)


@triton.jit
def quantized_heads(x, x_high, in_head, BITS: tl.constexpr):
    """Return what is stored of heads, and what will be read: codes or bytes, [n, width] int32;
    words, [n] int32; both halves of the dequantised channels, [n, width] float32.

    x: [n, width] float32; x_high: the upper half with 4 bits, else unused; in_head: [1, width]
    """
    lowest = tl.min(tl.where(in_head, x, float("inf")), axis=1)
    highest = tl.max(tl.where(in_head, x, -float("inf")), axis=1)
    if BITS == 4:
        lowest = tl.minimum(lowest, tl.min(tl.where(in_head, x_high, float("inf")), axis=1))
        highest = tl.maximum(highest, tl.max(tl.where(in_head, x_high, -float("inf")), axis=1))
    scale, zero, words = head_words(lowest, highest, BITS)
    stored = head_codes(x, scale, zero, BITS)
    MIDDLE: tl.constexpr = 0.0 if BITS == 8 else 7.5
    low = zero[:, None] + scale[:, None] * (stored.to(tl.float32) - MIDDLE)
    high = low
    if BITS == 4:
        codes = head_codes(x_high, scale, zero, BITS)
        high = zero[:, None] + scale[:, None] * (codes.to(tl.float32) - MIDDLE)
        stored = stored | (codes << 4)
    return stored, words, low, high


@triton.jit
def head_codes(x, scale, zero, BITS: tl.constexpr):
    """x: [n, m] float32; scale, zero: [n] → codes, int32: -127 .. 127 or 0 .. 15"""
    MIDDLE: tl.constexpr = 0.0 if BITS == 8 else 7.5
    STEPS: tl.constexpr = 127.0 if BITS == 8 else 7.5
    inverse = tl.where(scale > 1e-30, 1.0 / tl.where(scale > 1e-30, scale, 1.0), 0.0)
    codes = tl.floor((x - zero[:, None]) * inverse[:, None] + (MIDDLE + 0.5))
    return tl.minimum(tl.maximum(codes, MIDDLE - STEPS), MIDDLE + STEPS).to(tl.int32)
