"""Compiles the kernels of attention over paged caches for a Hopper GPU."""

from compiling import compile_cases

from jackfield.kernels.attention import (
    decode_splits,
    fused_decode_codes,
    fused_decode_floats,
    norm_heads,
    paged_attention_decode,
    paged_attention_prefill,
    qk_norm_rope_cache,
    shared_prefix,
)
from jackfield.kernels.attention.levels import level_constants

FLOATS = {
    "KEY_BITS": 16,
    "VALUE_BITS": 16,
    "key_words_ptr": None,
    "value_words_ptr": None,
}
COMMON = {
    **FLOATS,
    **level_constants(()),
    "BLOCK_BYTES": 0,
    "NUM_KV_HEADS": 8,
    "KEY_WIDTH": 128,
    "VALUE_WIDTH": 128,
    "BLOCK_K": 128,
    "BLOCK_V": 128,
    "HEAD_DIM": 128,
    "BLOCK_SIZE": 16,
    "WINDOW": 0,
    "CHUNK": 0,
    "SOFT_CAP": 0.0,
    "NUM_HEADS": 32,
    "ALIBI": False,
    "NORM_LAST": False,
    "DISTANCES": 0,
    "SINKS": False,
    "SHARED": False,
    "MIXED": False,
    "SEVERAL": False,
    "UNIFORM": False,
    "VALUE_PARTS": 1,
}
# Gemma 2's.
WIDE = {
    **COMMON,
    "HEAD_DIM": 256,
    "BLOCK_D": 256,
    "KEY_WIDTH": 256,
    "VALUE_WIDTH": 256,
    "BLOCK_K": 256,
    "BLOCK_V": 256,
    "NUM_HEADS": 16,
    "NUM_KV_HEADS": 8,
    "WINDOW": 4096,
    "SOFT_CAP": 50.0,
    "GROUP": 2,
}
# Llama 4's, and two chunks of a size that is no power of two.
CHUNKS = {**COMMON, "WINDOW": 8192, "CHUNK": 8192, "NUM_HEADS": 40, "GROUP": 5}
TWO_CHUNKS = {**COMMON, "WINDOW": 6000, "CHUNK": 3000}
MORE = {"ALIBI": True, "NORM_LAST": False, "SINKS": True}
INT8 = {"KEY_BITS": 8, "VALUE_BITS": 8}
INT4_VALUES = {"KEY_BITS": 8, "VALUE_BITS": 4, "VALUE_WIDTH": 64, "BLOCK_V": 64}
INT4_CACHE = {
    **INT4_VALUES,
    "KEY_BITS": 4,
    "KEY_WIDTH": 64,
    "BLOCK_K": 64,
}
WORDS = {"key_words_ptr": "*i32", "value_words_ptr": "*i32"}
CODES = {
    8: {**WORDS, "key_cache_ptr": "*i8", "value_cache_ptr": "*i8"},
    4: {**WORDS, "key_cache_ptr": "*u8", "value_cache_ptr": "*u8"},
    84: {**WORDS, "key_cache_ptr": "*i8", "value_cache_ptr": "*u8"},
}
DECODE = {"MIN_TILES": 2, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_D": 128, "BLOCK_S": 8, "GROUP": 4}
FP8_CACHE = {"key_cache_ptr": "*fp8e4nv", "value_cache_ptr": "*fp8e4nv"}
FUSED = {
    "ROTARY_DIM": 128,
    "ALIBI": False,
    "NORM_LAST": False,
    "POSITIONS": False,
    "KEEP_QUERIES": False,
    "NORM_QUERY": True,
    "NORM_KEY": True,
    "BLOCK_G": 4,
    "FP8": False,
    "PRELOAD_KV": False,
    "AHEAD": False,
    "NEW_TOKEN_PROGRAM": False,
    "PREFETCH": False,
    "PDL": True,
    "EARLY_LAUNCH": True,
}
WRITE = {"HALF": 64, "ROTATE": True, "NORM_QUERY": True, "NORM_KEY": True, "CACHE": True}
WRITE |= {"GROUP": 8, "BLOCK_HALF": 64, "BLOCK_REST": 1, "FP8": False, "PDL": True}
PREFILL = {"GROUP": 4, "BLOCK_M": 128, "BLOCK_N": 64}
E5M2_CACHE = {"key_cache_ptr": "*fp8e5", "value_cache_ptr": "*fp8e5"}
# Where ptxas 12.8 went wrong while low and high halves had a product each.
HEADS_OF_64 = {**PREFILL, "HEAD_DIM": 64, "KEY_WIDTH": 64, "BLOCK_K": 64}
HEADS_OF_64 |= {"VALUE_WIDTH": 32, "BLOCK_V": 32}
KERNELS = [
    (
        fused_decode_floats._fused_decode_kernel,
        {
            **COMMON,
            **DECODE,
            "NUM_KV_HEADS": 8,
            "ROTARY_DIM": 128,
            "ALIBI": False,
            "NORM_LAST": False,
            "POSITIONS": True,
            "KEEP_QUERIES": True,
            "NORM_QUERY": True,
            "NORM_KEY": True,
            "BLOCK_G": 4,
            "FP8": False,
            "PRELOAD_KV": True,
            "AHEAD": True,
            "MIN_TILES": 1,
            "BLOCK_N": 32,
            "NEW_TOKEN_PROGRAM": True,
            "PREFETCH": True,
            "PDL": True,
            "EARLY_LAUNCH": True,
        },
        4,
    ),
    (
        norm_heads._norm_heads_kernel,
        {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": 128,
            "QUERY_BIAS": True,
            "KEY_BIAS": True,
            "HEADS": 16,
            "BLOCK_D": 128,
            "PDL": True,
        },
        4,
    ),
    (
        qk_norm_rope_cache._qk_norm_rope_cache_kernel,
        {
            **COMMON,
            "NUM_KV_HEADS": 8,
            "HALF": 64,
            "ROTATE": True,
            "NORM_QUERY": True,
            "NORM_KEY": True,
            "CACHE": True,
            "GROUP": 8,
            "BLOCK_HALF": 64,
            "BLOCK_REST": 1,
            "FP8": True,
            "PDL": True,
        },
        2,
        FP8_CACHE,
    ),
    (paged_attention_decode._decode_kernel, {**COMMON, **DECODE, "SPLIT": True, "PDL": True}, 4),
    (
        paged_attention_decode._decode_kernel,
        {**COMMON, **DECODE, "SPLIT": True, "PDL": True},
        4,
        FP8_CACHE,
    ),
    (
        paged_attention_decode._decode_kernel,
        {**COMMON, **DECODE, **MORE, "SPLIT": False, "PDL": True},
        4,
    ),
    # Rows that share a prefix.
    *(
        (
            paged_attention_decode._decode_kernel,
            {**COMMON, **DECODE, "SPLIT": split, "SHARED": True, "PDL": True},
            4,
        )
        for split in (False, True)
    ),
    (decode_splits._join_kernel, {**COMMON, **DECODE, "SHARED": True, "PDL": True}, 4),
    (shared_prefix._prefix_kernel, {**COMMON, **DECODE, "BLOCK_M": 64, "PDL": True}, 4),
    # Rows of 5 and of 13 tokens.
    *(
        (
            paged_attention_decode._decode_kernel,
            {**COMMON, **DECODE, "SPLIT": True, "PDL": True, "SEVERAL": True, "BLOCK_M": rows},
            4,
        )
        for rows in (32, 64)
    ),
    (
        paged_attention_decode._decode_kernel,
        {**COMMON, **DECODE, "DISTANCES": 129, "SPLIT": True, "PDL": True},
        4,
        {"slopes_ptr": "*bf16"},
    ),
    (
        paged_attention_prefill._prefill_kernel,
        {**COMMON, "DISTANCES": 129, "GROUP": 1, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 128},
        4,
        {"slopes_ptr": "*bf16"},
    ),
    (
        fused_decode_floats._fused_decode_kernel,
        {
            **COMMON,
            **DECODE,
            "NUM_KV_HEADS": 8,
            "ROTARY_DIM": 64,
            "ALIBI": True,
            "NORM_LAST": False,
            "POSITIONS": False,
            "KEEP_QUERIES": False,
            "NORM_QUERY": True,
            "NORM_KEY": True,
            "BLOCK_G": 4,
            "FP8": True,
            "PRELOAD_KV": True,
            "AHEAD": True,
            "MIN_TILES": 1,
            "BLOCK_N": 32,
            "NEW_TOKEN_PROGRAM": True,
            "PREFETCH": True,
            "PDL": True,
            "EARLY_LAUNCH": True,
        },
        4,
        FP8_CACHE,
    ),
    (
        paged_attention_prefill._prefill_kernel,
        {**COMMON, "GROUP": 4, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 128},
        4,
        FP8_CACHE,
    ),
    (decode_splits._join_kernel, {**COMMON, **DECODE, "PDL": True}, 4),
    (decode_splits._join_kernel, {**COMMON, **DECODE, **MORE, "PDL": True}, 4),
    (
        paged_attention_prefill._prefill_kernel,
        {**COMMON, "GROUP": 4, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 128},
        4,
    ),
    (
        paged_attention_prefill._prefill_kernel,
        {**COMMON, **MORE, "GROUP": 4, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 128},
        4,
    ),
    (
        paged_attention_decode._decode_kernel,
        {**COMMON, **DECODE, "SPLIT": True, "MIXED": True, "PDL": True},
        4,
    ),
    (decode_splits._join_kernel, {**COMMON, **DECODE, "MIXED": True, "PDL": True}, 4),
    (
        paged_attention_prefill._prefill_kernel,
        {**COMMON, "GROUP": 4, "MIXED": True, "BLOCK_M": 256, "BLOCK_N": 64, "BLOCK_D": 128},
        8,
    ),
    (paged_attention_prefill._prefill_kernel, {**WIDE, "BLOCK_M": 64, "BLOCK_N": 32}, 4),
    (
        paged_attention_decode._decode_kernel,
        {**DECODE, **WIDE, "BLOCK_N": 32, "SPLIT": True, "PDL": True},
        4,
    ),
    (
        fused_decode_floats._fused_decode_kernel,
        {
            **DECODE,
            **WIDE,
            "BLOCK_N": 32,
            "ROTARY_DIM": 256,
            "ALIBI": False,
            "NORM_LAST": False,
            "POSITIONS": False,
            "KEEP_QUERIES": False,
            "NORM_QUERY": True,
            "NORM_KEY": True,
            "BLOCK_G": 2,
            "FP8": False,
            "PRELOAD_KV": False,
            "AHEAD": False,
            "NEW_TOKEN_PROGRAM": False,
            "PREFETCH": False,
            "PDL": True,
            "EARLY_LAUNCH": True,
        },
        4,
        {"query_weight_ptr": "*fp32", "key_weight_ptr": "*fp32"},
    ),
    (
        qk_norm_rope_cache._qk_norm_rope_cache_kernel,
        {
            **WIDE,
            "HALF": 128,
            "ROTATE": True,
            "NORM_QUERY": True,
            "NORM_KEY": True,
            "CACHE": True,
            "GROUP": 8,
            "BLOCK_HALF": 128,
            "BLOCK_REST": 1,
            "FP8": False,
            "PDL": True,
        },
        2,
        {"query_weight_ptr": "*fp32", "key_weight_ptr": "*fp32"},
    ),
]
for bits, widths in ((8, INT8), (84, INT4_VALUES), (4, INT4_CACHE)):
    quantized = {**COMMON, **DECODE, **widths}
    for name in WORDS:
        quantized.pop(name)
    KERNELS += [
        (paged_attention_decode._decode_kernel, {**quantized, "SPLIT": True, "PDL": True}, 4,
         CODES[bits]),
        (fused_decode_codes.fused_decode_codes_kernel, {**quantized, **FUSED}, 4, CODES[bits]),
        (paged_attention_prefill._prefill_kernel, {**quantized, **PREFILL}, 4, CODES[bits]),
        (qk_norm_rope_cache._qk_norm_rope_cache_kernel, {**quantized, **WRITE}, 2, CODES[bits]),
    ]  # fmt: skip
for bits, widths in ((8, INT8), (4, INT4_CACHE)):
    # Codes become floats of other bits than those of bfloat16; of float32, by conversions.
    quantized = {k: v for k, v in {**COMMON, **DECODE, **widths}.items() if k not in WORDS}
    half, single = (
        {**CODES[bits], **dict.fromkeys(("out_ptr", "query_ptr"), f"*{kind}")}
        for kind in ("fp16", "fp32")
    )
    narrow = {**quantized, "BLOCK_N": 32, "SPLIT": False, "PDL": False}
    KERNELS += [
        (paged_attention_decode._decode_kernel, {**quantized, "SPLIT": True, "PDL": True}, 4, half),
        (paged_attention_prefill._prefill_kernel, {**quantized, **PREFILL}, 8, half),
        (paged_attention_decode._decode_kernel, narrow, 4, single),
        (paged_attention_prefill._prefill_kernel, {**narrow, "BLOCK_M": 32}, 4, single),
    ]
# Of 9 bytes, which are read one by one.
ODD = {**COMMON, **DECODE, "KEY_BITS": 4, "VALUE_BITS": 4, "HEAD_DIM": 18, "KEY_WIDTH": 9}
ODD |= {"VALUE_WIDTH": 9, "BLOCK_K": 32, "BLOCK_V": 32, "SPLIT": True, "PDL": True}
KERNELS.append(
    (paged_attention_decode._decode_kernel, {k: v for k, v in ODD.items() if k not in WORDS}, 4,
     CODES[4])
)  # fmt: skip
KERNELS += [
    (paged_attention_decode._decode_kernel, {**COMMON, **DECODE, "SPLIT": True, "PDL": True}, 4,
     E5M2_CACHE),
    (paged_attention_prefill._prefill_kernel, {**COMMON, **PREFILL}, 8, E5M2_CACHE),
]  # fmt: skip
KERNELS.append(
    (
        paged_attention_prefill._prefill_kernel,
        {k: v for k, v in {**COMMON, **INT4_VALUES, **HEADS_OF_64}.items() if k not in WORDS},
        8,
        CODES[84],
    )
)
KERNELS += [
    (paged_attention_decode._decode_kernel, {**DECODE, **CHUNKS, "SPLIT": True, "PDL": True}, 4),
    (decode_splits._join_kernel, {**DECODE, **CHUNKS, "PDL": True}, 4),
    (fused_decode_floats._fused_decode_kernel,
     {**DECODE, **CHUNKS, **FUSED, "BLOCK_G": 8, "POSITIONS": True, "kept_queries_ptr": None,
      "kept_places_ptr": None}, 4),
    (paged_attention_prefill._prefill_kernel, {**CHUNKS, "BLOCK_M": 256, "BLOCK_N": 64}, 8),
    (paged_attention_prefill._prefill_kernel,
     {**CHUNKS, "MIXED": True, "BLOCK_M": 128, "BLOCK_N": 64}, 8),
    (paged_attention_prefill._prefill_kernel, {**TWO_CHUNKS, **PREFILL}, 4),
    (paged_attention_decode._decode_kernel, {**TWO_CHUNKS, **DECODE, "SPLIT": False, "PDL": True},
     4),
]  # fmt: skip
# A query head with a key head of its own.
ONE_HEAD = {**COMMON, **DECODE, **FUSED, "NUM_HEADS": 8, "GROUP": 1, "BLOCK_M": 1, "BLOCK_G": 1,
            "BLOCK_N": 32, "NEW_TOKEN_PROGRAM": True, "PRELOAD_KV": True, "PREFETCH": True,
            "kept_queries_ptr": None, "kept_places_ptr": None}  # fmt: skip
KERNELS += [
    (fused_decode_floats._fused_decode_kernel, ONE_HEAD, 4),
    (fused_decode_floats._fused_decode_kernel, {**ONE_HEAD, "AHEAD": True, "MIN_TILES": 1}, 4),
    (fused_decode_floats._fused_decode_kernel,
     {**ONE_HEAD, "PRELOAD_KV": False, "FP8": True, "SOFT_CAP": 5.0}, 4, FP8_CACHE),
]  # fmt: skip
compile_cases(KERNELS)
