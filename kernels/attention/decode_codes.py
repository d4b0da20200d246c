"""Decode attention's products with codes of a quantized cache, read as 16-bit words.

A word has two adjacent bytes of a token: channels 2 i and 2 i + 1 with 8 bits; with 4 bits 2 i and
2 i + 1 of the lower half of the head, and the same ones of its upper half. Each of these two or
four parts is a product of its own, with its channels of the query or its own sums. A product's
operand has two tokens or two words in a register, so that a mask and at most one shift make a pair
of floats. Shared memory is read transposed in units of 16 bits, so this holds for values, too.

The offset that the conversion adds to codes is subtracted where it costs nothing: for keys in the
initial sums of a product; for 4-bit values in one sum over the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..widen import round_pairs
from .quantized_tiles import (
    FLOATS,
    block_width,
    by_bits,
    code_middle,
    product_query,
    word_scale,
    word_zero,
)


def decode_width(width: int, bits: int) -> int:
    """Return the columns of a tile for a key or value of `width` numbers or bytes. bits: 8, 4 or
    `FLOATS`
    """
    if bits == FLOATS:
        return block_width(width)
    return 2 * max(16, int(triton.next_power_of_2(triton.cdiv(width, 2))))


@triton.jit
def _block_slots(
    tile, offs_n, lowest, highest, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the column in the block table and the place in its block of each position of a tile,
    [N] each. Positions after `highest`, and with a window before `lowest`, get the column of
    those."""
    if BLOCK_N % BLOCK_SIZE == 0:
        # The places are the same in all tiles: computed once.
        column = tile * (BLOCK_N // BLOCK_SIZE) + offs_n // BLOCK_SIZE
        slot = offs_n % BLOCK_SIZE
    else:
        position = tile * BLOCK_N + offs_n
        column = position // BLOCK_SIZE
        slot = position % BLOCK_SIZE
    column = tl.minimum(column, highest // BLOCK_SIZE)
    if WINDOW > 0:
        column = tl.maximum(column, lowest // BLOCK_SIZE)
    return column, slot


@triton.jit
def _load_pairs(
    codes_ptr, block, slot, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the codes of tokens, [N, PAIRS] int16. block: [N] int64; slot: [N]; WIDTH: bytes of
    a token, which are read one by one if they are odd in number"""
    pair = tl.arange(0, PAIRS)[None, :]
    token = (slot * NUM_KV_HEADS + kv_head)[:, None]
    if WIDTH % 2 == 0:
        HALF: tl.constexpr = WIDTH // 2
        places = codes_ptr.to(tl.pointer_type(tl.int16)) + (token * HALF + pair)
        places += block[:, None] * (BLOCK_SIZE * NUM_KV_HEADS * HALF)
        if HALF == PAIRS:
            return tl.load(places)
        else:
            return tl.load(places, mask=pair < HALF, other=0)
    else:
        places = codes_ptr.to(tl.pointer_type(tl.uint8)) + (token * WIDTH + 2 * pair)
        places += block[:, None] * (BLOCK_SIZE * NUM_KV_HEADS * WIDTH)
        low = tl.load(places, mask=2 * pair < WIDTH, other=0)
        high = tl.load(places + 1, mask=2 * pair + 1 < WIDTH, other=0)
        return low.to(tl.int16) | (high.to(tl.int16) << 8)


@triton.jit
def load_codes(
    key_cache_ptr, value_cache_ptr, key_words_ptr, value_words_ptr, table, tile, offs_n, valid,
    lowest, highest, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_PAIRS: tl.constexpr, VALUE_PAIRS: tl.constexpr,
):  # fmt: skip
    """Return pairs of the keys and values of a tile, [N, KEY_PAIRS] and [N, VALUE_PAIRS] int16, and
    their words, [N] int32. Where not valid, the words of values are zeros and the rest is
    undefined, but finite: codes are never NaN.
    """
    column, slot = _block_slots(tile, offs_n, lowest, highest, BLOCK_N, BLOCK_SIZE, WINDOW)
    block = tl.load(table + column).to(tl.int64)
    keys = _load_pairs(
        key_cache_ptr, block, slot, kv_head, NUM_KV_HEADS, BLOCK_SIZE, KEY_WIDTH, KEY_PAIRS
    )
    values = _load_pairs(
        value_cache_ptr, block, slot, kv_head, NUM_KV_HEADS, BLOCK_SIZE, VALUE_WIDTH, VALUE_PAIRS
    )
    words = block * (NUM_KV_HEADS * BLOCK_SIZE) + (kv_head * BLOCK_SIZE + slot)
    key_words = tl.load(key_words_ptr + words)
    value_words = tl.where(valid, tl.load(value_words_ptr + words), 0)
    return keys, values, key_words, value_words


@triton.constexpr_function
def _key_offsets(bits, dtype):
    """Return the offset that `_key_parts` adds to codes in the lower half of a head (or all of it)
    and in the upper half, and the factor of the codes there.
    """
    if not by_bits(dtype):
        return (0.0, 0.0, 1.0) if bits == 8 else (7.5, 7.5, 1.0)
    return (1152.0, 0.0, 1.0) if bits == 8 else (1031.5, 1144.0, 16.0)


@triton.jit
def _plain_parts(pairs, dtype: tl.constexpr, BITS: tl.constexpr):
    words = pairs.to(tl.int32)
    if BITS == 8:
        return ((words << 24) >> 24).to(dtype), (words >> 8).to(dtype)
    else:
        return (
            (words & 15).to(dtype),
            ((words >> 8) & 15).to(dtype),
            ((words >> 4) & 15).to(dtype),
            ((words >> 12) & 15).to(dtype),
        )


_KEYS_OF_8 = tl.constexpr(
    "{ .reg .b32 odd; shr.u32 odd, $2, 8; lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;"
    " lop3.b32 $1, odd, 0x00ff00ff, 0x64806480, 0x6a; }"
)
_KEYS_OF_4 = tl.constexpr(
    "{ .reg .b32 odd; shr.u32 odd, $4, 8;"
    " lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;"
    " lop3.b32 $1, odd, 0x000f000f, 0x64006400, 0xea;"
    # The upper codes where they are: 1024 + 16 * code.
    " lop3.b32 $2, $4, 0x00f000f0, 0x64006400, 0xea;"
    " lop3.b32 $3, odd, 0x00f000f0, 0x64006400, 0xea; }"
)


@triton.jit
def _key_parts(pairs, dtype: tl.constexpr, BITS: tl.constexpr):
    """int16 [N, n] → two or four [N, n] of `dtype`: see `_key_offsets`."""
    if not by_bits(dtype):
        return _plain_parts(pairs, dtype, BITS)
    elif BITS == 8:
        return tl.inline_asm_elementwise(
            _KEYS_OF_8, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _KEYS_OF_4, "=&r,=&r,=&r,=&r,r", [pairs],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


# Lower seven bits with the upper byte of 128, and - (128 or 256) by the sign bit.
_VALUES_OF_8 = tl.constexpr(
    "{ .reg .b32 odd, number, sign, one; mov.b32 one, 0x3f803f80; shr.u32 odd, $2, 8;"
    " lop3.b32 number, $2, 0x007f007f, 0x43004300, 0xea;"
    " lop3.b32 sign, $2, 0x00800080, 0xc300c300, 0xea; fma.rn.bf16x2 $0, number, one, sign;"
    " lop3.b32 number, odd, 0x007f007f, 0x43004300, 0xea;"
    " lop3.b32 sign, odd, 0x00800080, 0xc300c300, 0xea; fma.rn.bf16x2 $1, number, one, sign; }"
)
_VALUES_OF_8_FLOAT16 = tl.constexpr(
    "{ .reg .b32 odd, number, base; mov.b32 base, 0x64806480; shr.u32 odd, $2, 8;"
    " lop3.b32 number, $2, 0x00ff00ff, 0x64806480, 0x6a; sub.rn.f16x2 $0, number, base;"
    " lop3.b32 number, odd, 0x00ff00ff, 0x64806480, 0x6a; sub.rn.f16x2 $1, number, base; }"
)


def _values_of_4(upper: str) -> tl.constexpr:
    base = f"0x{upper}00{upper}00"
    return tl.constexpr(
        f"{{ .reg .b32 moved; lop3.b32 $0, $4, 0x000f000f, {base}, 0xea;"
        f" shr.u32 moved, $4, 8; lop3.b32 $1, moved, 0x000f000f, {base}, 0xea;"
        f" shr.u32 moved, $4, 4; lop3.b32 $2, moved, 0x000f000f, {base}, 0xea;"
        f" shr.u32 moved, $4, 12; lop3.b32 $3, moved, 0x000f000f, {base}, 0xea; }}"
    )


_VALUES_OF_4, _VALUES_OF_4_FLOAT16 = _values_of_4("43"), _values_of_4("64")


@triton.jit
def _value_parts(pairs, dtype: tl.constexpr, BITS: tl.constexpr):
    """int16 [N, n] → two or four [N, n] of `dtype`: see `code_middle`."""
    if not by_bits(dtype):
        return _plain_parts(pairs, dtype, BITS)
    elif BITS == 8:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _VALUES_OF_8, "=r,=r,r", [pairs],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _VALUES_OF_8_FLOAT16, "=r,=r,r", [pairs],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _VALUES_OF_4, "=&r,=&r,=&r,=&r,r", [pairs],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _VALUES_OF_4_FLOAT16, "=&r,=&r,=&r,=&r,r", [pairs],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip


@triton.jit
def _split_pairs(x):
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def query_parts(low, high, BITS: tl.constexpr):
    """Halves of heads, [n, 2 m] each, of which the first is the whole with 8 bits → parts"""
    even, odd = _split_pairs(low)
    if BITS == 8:
        return even, odd
    else:
        upper_even, upper_odd = _split_pairs(high)
        return even, odd, upper_even, upper_odd


@triton.jit
def add_halves(acc, low, high, BITS: tl.constexpr):
    """Return acc + halves of a head, [1, 2 n] each. acc: parts, [M, n] float32 each"""
    more = query_parts(low.to(tl.float32), high.to(tl.float32), BITS)
    if BITS == 8:
        return acc[0] + more[0], acc[1] + more[1]
    else:
        return acc[0] + more[0], acc[1] + more[1], acc[2] + more[2], acc[3] + more[3]


@triton.jit
def load_query_parts(
    query_ptr, in_row, dtype: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the parts of queries, [M, BLOCK] of `dtype` each. query_ptr: [M, 1]; in_row: [M, 1];
    WIDTH: bytes of a key"""
    pair = tl.arange(0, BLOCK)[None, :]
    even = in_row & (2 * pair < WIDTH)
    odd = in_row & (2 * pair + 1 < WIDTH)
    query_ptr += 2 * pair
    low_even = product_query(tl.load(query_ptr, mask=even, other=0.0), dtype)
    low_odd = product_query(tl.load(query_ptr + 1, mask=odd, other=0.0), dtype)
    if BITS == 8:
        return low_even, low_odd
    else:
        query_ptr += WIDTH
        high_even = product_query(tl.load(query_ptr, mask=even, other=0.0), dtype)
        high_odd = product_query(tl.load(query_ptr + 1, mask=odd, other=0.0), dtype)
        return low_even, low_odd, high_even, high_odd


@triton.jit
def product_starts(query, BITS: tl.constexpr):
    """Return what the sums of `code_scores` start from, [M, 1] float32 of the lower half of a head
    (or all of it) and of the upper one, and the sum of each query, [M]. query: its parts"""
    LOW: tl.constexpr = _key_offsets(BITS, query[0].dtype)[0]
    HIGH: tl.constexpr = _key_offsets(BITS, query[0].dtype)[1]
    low = tl.sum(query[0].to(tl.float32), axis=1) + tl.sum(query[1].to(tl.float32), axis=1)
    high = tl.zeros_like(low)
    if BITS == 4:
        high = tl.sum(query[2].to(tl.float32), axis=1) + tl.sum(query[3].to(tl.float32), axis=1)
    return low[:, None] * -LOW, high[:, None] * -HIGH, low + high


@triton.jit
def code_scores(query, low, high, scaled_sum, pairs, words, scale, BITS: tl.constexpr):
    """Return scale * q · k, [M, N] float32.

    query: parts of the queries, [M, n] each; low, high: of `product_starts`; scaled_sum: [M]
    float32, scale * sum(q); pairs: [N, n] int16; words: [N]
    """
    dtype: tl.constexpr = query[0].dtype
    keys = _key_parts(pairs, dtype, BITS)
    zeros = tl.zeros([query[0].shape[0], pairs.shape[0]], tl.float32)
    product = tl.dot(query[0], tl.trans(keys[0]), low + zeros, input_precision="ieee")
    product = tl.dot(query[1], tl.trans(keys[1]), product, input_precision="ieee")
    if BITS == 4:
        TIMES: tl.constexpr = _key_offsets(BITS, dtype)[2]
        upper = tl.dot(query[2], tl.trans(keys[2]), high + zeros, input_precision="ieee")
        upper = tl.dot(query[3], tl.trans(keys[3]), upper, input_precision="ieee")
        product += upper * (1.0 / TIMES)
    step = word_scale(words) * scale
    return product * step[None, :] + scaled_sum[:, None] * word_zero(words)[None, :]


@triton.jit
def zero_parts(M: tl.constexpr, n: tl.constexpr, BITS: tl.constexpr):
    zeros = tl.zeros([M, n], tl.float32)
    if BITS == 8:
        return zeros, zeros
    else:
        return zeros, zeros, zeros, zeros


@triton.jit
def _code_weights(weights, words, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return weights of codes, [M, N] of `dtype`, and what their product lacks in each channel, as
    [M, N] float32 to be summed. weights: [M, N] float32; words: [N]"""
    scaled = weights * word_scale(words)[None, :]
    missing = weights * word_zero(words)[None, :]
    if BITS == 8:
        scaled = scaled.to(dtype)
    else:
        scaled = round_pairs(scaled, dtype)
        # Of the weights as they were multiplied: what is rounded off in them is no part of the sum.
        missing -= code_middle(BITS, dtype) * scaled.to(tl.float32)
    return scaled, missing


@triton.jit
def add_code_values(acc, decay, weights, pairs, words, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return decay * acc + weights · values, in parts, [M, n] float32 each, and what is missing
    in each of their channels, as [M, N] float32 to be summed.

    decay: [M] float32; weights: [M, N] float32; pairs: [N, n] int16; words: [N]; dtype: of the
    product
    """
    scaled, missing = _code_weights(weights, words, dtype, BITS)
    values = _value_parts(pairs, dtype, BITS)
    even = tl.dot(scaled, values[0], acc[0] * decay[:, None], input_precision="ieee")
    odd = tl.dot(scaled, values[1], acc[1] * decay[:, None], input_precision="ieee")
    if BITS == 8:
        return (even, odd), missing
    else:
        upper_even = tl.dot(scaled, values[2], acc[2] * decay[:, None], input_precision="ieee")
        upper_odd = tl.dot(scaled, values[3], acc[3] * decay[:, None], input_precision="ieee")
        return (even, odd, upper_even, upper_odd), missing


@triton.jit
def whole_halves(acc, BITS: tl.constexpr):
    low = tl.interleave(acc[0], acc[1])
    high = low
    if BITS == 4:
        high = tl.interleave(acc[2], acc[3])
    return low, high
