"""Compiles every kernel for a Hopper GPU, and prints its name; with `once`, its first case only."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from uniform_registers import unwritten_reads

from jackfield.kernels import (
    activations,
    decode_inputs,
    drafts,
    lookup_ngrams,
    rms_norm,
    sigmoid_gate,
    step_inputs,
)
from jackfield.kernels.attention import (
    decode_splits,
    fused_decode_attention,
    paged_attention_decode,
    paged_attention_prefill,
    qk_norm_rope_cache,
)
from jackfield.kernels.compaction import (
    best_tokens,
    compact_caches,
    key_pairs,
    key_scores,
    query_scores,
)
from jackfield.kernels.linear import (
    gemv,
    int4_gemv,
    quant_matmul,
    small_m_matmul,
    split_k_sum,
)
from jackfield.kernels.moe import combine, expert_gemv, expert_matmul, sort_tokens, topk_experts
from jackfield.kernels.quant import dequantize, quantize_rows
from jackfield.kernels.quant.quantized_weight import TileFormat
from jackfield.kernels.sampling import (
    choose_row,
    edit_logits,
    limits,
    mask_tokens,
    sample_gumbel,
    sample_tokens,
)

FLOATS = {
    "KEY_BITS": 16,
    "VALUE_BITS": 16,
    "key_words_ptr": None,
    "value_words_ptr": None,
}
DRAFTS = {
    "history_ptr": "*i32",
    "slots_ptr": "*i64",
    "lengths_ptr": "*i32",
    "num_proposed_ptr": "*i32",
    "token_ids_ptr": "*i32",
    "counts_ptr": "*i64",
    "stride_ids": "i32",
    "num_drafts": "i32",
}
COMMON = {
    **FLOATS,
    "NUM_KV_HEADS": 8,
    "KEY_WIDTH": 128,
    "VALUE_WIDTH": 128,
    "BLOCK_K": 128,
    "BLOCK_V": 128,
    "HEAD_DIM": 128,
    "BLOCK_SIZE": 16,
    "WINDOW": 0,
    "SOFT_CAP": 0.0,
    "NUM_HEADS": 32,
    "ALIBI": False,
    "NORM_LAST": False,
    "DISTANCES": 0,
    "SINKS": False,
    "MIXED": False,
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


def dense(width):
    return TileFormat(False, width, 1, 8, width, 1, False, False, 0)


def words(width, zero, bits=4):
    return TileFormat(True, width, 32 // bits, bits, 128, 1, True, zero, 1 << (bits - 1))


FP8 = {
    "FORMAT": TileFormat(True, 4096, 1, 8, 4096, 1, False, False, 0),
    "N": 4096,
    "BIAS": False,
    "RESIDUAL": True,
}
INT4 = {**FP8, "FORMAT": words(512, True), "WIDTH": 512, "GROUP_SIZE": 128, "ZERO": True}
GEMV_PLAIN = {"CENTERED": False, "NORM_BIAS": False, "ACTIVATION": "", "BLOCK_X": 1, "FACTOR": 1.0}
GEMV = {
    **GEMV_PLAIN,
    "UNROLL": 2,
    "NORM": True,
    "GATED": False,
    "PDL": True,
    "EARLY": True,
    "BLOCK_N": 4,
}
SLOT_TABLE = {"lengths_ptr": "*i32"}
FP8_TYPES = {"weight_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
FP8_CACHE = {"key_cache_ptr": "*fp8e4nv", "value_cache_ptr": "*fp8e4nv"}
INT4_TYPES = {"weight_ptr": "*i32", "zero_ptr": "*u8"}
# Qwen3-30B-A3B's experts: gate and up of [1536, 2048] each, down of [2048, 768].
EXPERTS = {"E": 128, "BLOCK_E": 128, "PDL": True, "BIAS": False, "SQUARED": False}
EXPERTS |= {"ALPHA": None, "LIMIT": None}
GATE_UP = {**EXPERTS, "N": 768, "FORMAT": dense(2048), "GATED": True, "DIVIDE": 8}
DOWN = {**EXPERTS, "N": 2048, "FORMAT": dense(768), "GATED": False, "DIVIDE": 1}
BLOCKS = {"FORMAT": TileFormat(True, 768, 1, 8, 128, 128, True, False, 0)}
EXPERT_GEMV = {
    "COUNT": 8,
    "FACTOR": True,
    "RESIDUAL": True,
    "CHUNKS": 8,
    "BLOCK_COUNT": 8,
    "UNROLL": 3,
    "BLOCK_N": 1,
    "BLOCK_K": 256,
    "PREFETCH": "192",
    "FOREIGN": False,
}
SLOT_GEMV = {
    **EXPERT_GEMV,
    "COUNT": 1,
    "FACTOR": False,
    "RESIDUAL": False,
    "BLOCK_COUNT": 1,
    "UNROLL": 2,
    "BLOCK_N": 4,
    "BLOCK_K": 1024,
    "PREFETCH": None,
}
COMBINE = {"SIZE": 2048, "TOP_K": 8, "OWN": None, "BLOCK": 1024, "PDL": True}
SMALL_M = {"GATED": False, "STAGES": 3, "PDL": True, "EARLY": True, "PREFETCH": None}
FEW = {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 128, "STAGES": 3}
MANY = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "STAGES": 3}
PIVOTS = {"PART_SIZE": 2048, "COUNT": 16, "CAPACITY": 8192}
TABLES = {
    "counts_ptr": "*i16",
    "allowed_ptr": "*i32",
    "grammar_ptr": "*i32",
    "grammar_rows_ptr": "*i64",
    "best_ptr": "*fp32",
    "won_ptr": "*fp32",
    "raw_ptr": "*fp32",
    "found_ptr": "*i32",
    "listed_ptr": "*i32",
    "limits_ptr": "*fp32",
    "sums_ptr": "*i64",
    "values_ptr": "*fp32",
    "ids_ptr": "*i32",
    "likely_values_ptr": "*fp32",
    "likely_ids_ptr": "*i32",
    "top_ids_ptr": "*i32",
    "top_logprobs_ptr": "*fp32",
    "logprob_ptr": "*fp32",
    "rank_ptr": "*i32",
}
CACHED = {
    "NUM_KV_HEADS": 8,
    "HEAD_DIM": 128,
    "BLOCK_SIZE": 16,
    "BLOCK_D": 128,
    "KEY_BITS": 16,
    "VALUE_BITS": 16,
    "ALIGNED": True,
    "BLOCK_N": 64,
}
QUERIES = {"GROUP": 4, "BLOCK_G": 4, "BLOCK_Q": 16, "SOFT_CAP": 0.0, "NUM_TILES": 16}
PAIRS = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 128}
LENGTHS = {
    "norms_ptr": "*fp32",
    "other_norms_ptr": "*fp32",
    "cosine_ptr": "*fp32",
    "index_ptr": "*i64",
    "similar": "fp32",
}
ADDRESSES = {
    "addresses_ptr": "*i64",
    "blocks_ptr": "*i32",
    "out_ptr": "*fp32",
    "mean_ptr": "*fp32",
    "log_sums_ptr": "*fp32",
}
ACTIVATION = {"SIZE": 1000, "BLOCK": 1024, "PDL": True}
KERNELS = [
    (
        topk_experts._topk_experts_kernel,
        {
            "E": 128,
            "TOP_K": 8,
            "SIGMOID": False,
            "BIAS": False,
            "RENORMALIZE": True,
            "FACTOR": 1.0,
            "GROUPS": 1,
            "TOP_GROUPS": 1,
            "BLOCK_G": 1,
            "ROWS": 4,
            "BLOCK_E": 128,
            "BLOCK_TOP": 8,
            "PDL": True,
        },
        4,
    ),
    (
        topk_experts._topk_experts_kernel,
        {
            "E": 160,
            "TOP_K": 8,
            "SIGMOID": True,
            "BIAS": True,
            "RENORMALIZE": True,
            "FACTOR": 2.5,
            "GROUPS": 8,
            "TOP_GROUPS": 4,
            "BLOCK_G": 8,
            "ROWS": 4,
            "BLOCK_E": 256,
            "BLOCK_TOP": 8,
            "PDL": True,
        },
        4,
    ),
    (sort_tokens._sort_tokens_kernel, {"TOP_K": 8, "BLOCK_TOP": 8, "BLOCK": 1024, "PDL": True}, 8),
    (combine._combine_kernel, COMBINE, 4),
    (combine._combine_kernel, {**COMBINE, "OWN": 64}, 4, {"experts_ptr": "*i32"}),
    (expert_gemv._expert_gemv_kernel, {**GATE_UP, **SLOT_GEMV}, 4),
    (expert_gemv._expert_gemv_kernel, {**GATE_UP, **SLOT_GEMV, "FOREIGN": True}, 4),
    (expert_gemv._expert_gemv_kernel, {**DOWN, **EXPERT_GEMV}, 2),
    (expert_gemv._expert_gemv_kernel, {**DOWN, **EXPERT_GEMV, "FOREIGN": True}, 2),
    (
        expert_gemv._expert_gemv_kernel,
        {**DOWN, **EXPERT_GEMV, **BLOCKS, "BLOCK_K": 128, "PREFETCH": "96"},
        2,
        FP8_TYPES,
    ),
    (
        expert_gemv._expert_gemv_kernel,
        {**GATE_UP, **SLOT_GEMV, "FORMAT": words(256, True), "BLOCK_K": 128},
        4,
        INT4_TYPES,
    ),
    (expert_matmul._expert_matmul_kernel, {**GATE_UP, **FEW, "BLOCK_N": 64}, 4),
    (expert_matmul._expert_matmul_kernel, {**DOWN, **FEW}, 4),
    (expert_matmul._expert_matmul_kernel, {**GATE_UP, **MANY, "BLOCK_N": 128}, 8),
    (expert_matmul._expert_matmul_kernel, {**DOWN, **MANY}, 8),
    (expert_matmul._expert_matmul_kernel, {**DOWN, **BLOCKS, **FEW, "STAGES": 4}, 4, FP8_TYPES),
    (
        expert_matmul._expert_matmul_kernel,
        {
            **GATE_UP,
            "FORMAT": words(256, True),
            "BLOCK_M": 16,
            "BLOCK_N": 64,
            "BLOCK_K": 32,
            "STAGES": 4,
        },
        4,
        INT4_TYPES,
    ),
    (
        expert_matmul._expert_matmul_kernel,
        {
            **DOWN,
            "FORMAT": words(96, False),
            "BLOCK_M": 64,
            "BLOCK_N": 128,
            "BLOCK_K": 32,
            "STAGES": 3,
        },
        8,
        INT4_TYPES,
    ),
    (
        split_k_sum._split_k_sum_kernel,
        {"N": 4096, "SPLIT_K": 4, "SCALED": False, "BIAS": True, "RESIDUAL": True, "BLOCK": 1024},
        4,
        {"partial_ptr": "*fp32"},
    ),
    (gemv._gemv_kernel, {**FP8, **GEMV, "BLOCK_K": 2048}, 4, FP8_TYPES),
    (gemv._gemv_kernel, {**INT4, **GEMV, "BLOCK_K": 128}, 1, INT4_TYPES),
    (
        small_m_matmul._small_m_matmul_kernel,
        {**FP8, **SMALL_M, "SPLIT_K": 1, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128},
        4,
        FP8_TYPES,
    ),
    (
        small_m_matmul._small_m_matmul_kernel,
        {
            **INT4,
            **SMALL_M,
            "FORMAT": words(1024, True, 8),
            "SPLIT_K": 4,
            "BLOCK_M": 64,
            "BLOCK_N": 64,
            "BLOCK_K": 64,
        },
        4,
        INT4_TYPES,
    ),
    (
        quant_matmul._quant_matmul_kernel,
        {**FP8, "SPLIT_K": 1, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128},
        4,
        FP8_TYPES,
    ),
    (
        quant_matmul._quant_matmul_kernel,
        {**INT4, "SPLIT_K": 4, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64},
        4,
        {**INT4_TYPES, "out_ptr": "*fp32"},
    ),
    (
        int4_gemv._int4_gemv_kernel,
        {**INT4, **GEMV, "BLOCK_K": 64, "WARPS": 4, "STAGES": 3},
        4,
        INT4_TYPES,
    ),
    (
        small_m_matmul._small_m_matmul_kernel,
        {**INT4, **SMALL_M, "SPLIT_K": 2, "BLOCK_M": 8, "BLOCK_N": 32, "BLOCK_K": 64},
        2,
        INT4_TYPES,
    ),
    (
        small_m_matmul._small_m_matmul_kernel,
        {
            **INT4,
            **SMALL_M,
            "FORMAT": words(512, False),
            "SPLIT_K": 1,
            "BLOCK_M": 64,
            "BLOCK_N": 128,
            "BLOCK_K": 32,
        },
        8,
        INT4_TYPES,
    ),
    (
        quantize_rows._quantize_rows_kernel,
        {"SIZE": 4096, "BLOCK": 4096, "LARGEST": 448.0, "NORM": True, "GIVEN": False, "PDL": True},
        8,
        {"out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
    ),
    (dequantize._dequantize_weight_kernel, {**INT4, "BLOCK_N": 8, "BLOCK_K": 128}, 4, INT4_TYPES),
    (sample_gumbel._part_kernel, {"PART_SIZE": 2048}, 4),
    (sample_tokens._begin_kernel, {"PART_SIZE": 2048}, 4, TABLES),
    (limits.limits_kernel, {"BLOCK": 128}, 8, TABLES),
    (sample_tokens._pivots_kernel, PIVOTS, 8, TABLES),
    (sample_tokens._gather_kernel, {**PIVOTS, "MOST_LIKELY": 1024}, 8, TABLES),
    (
        choose_row.choose_row_kernel,
        {"CAPACITY": 8192, "MOST_LIKELY": 1024, "BLOCK": 128},
        16,
        TABLES,
    ),
    (edit_logits._edit_kernel, {"PART_SIZE": 2048}, 4, {**TABLES, "out_ptr": "*fp32"}),
    (sample_gumbel._row_kernel, {"BLOCK": 128}, 1),
    (
        decode_inputs._decode_inputs_kernel,
        {"DROPPED": True, "BLOCK_SIZE": 16, "BLOCK": 1024},
        4,
        SLOT_TABLE,
    ),
    (
        lookup_ngrams._lookup_kernel,
        {"LEAST": 2, "MOST": 4, "DRAFTS": 8, "TOKENS": 2048},
        8,
        {**DRAFTS, "drafts_ptr": "*i32", "counts_ptr": "*i32", "lengths_ptr": "*i64"},
    ),
    (
        drafts._verify_kernel,
        {"BLOCK": 8},
        1,
        {
            **DRAFTS,
            "verdicts_ptr": "*i32",
            "chosen_ptr": "*i32",
            "drafts_ptr": "*i32",
            "starts_ptr": "*i32",
        },
    ),
    (drafts._keep_kernel, {"BLOCK": 1}, 1, {**DRAFTS, "kept_ptr": "*i32"}),
    (
        best_tokens._best_tokens_kernel,
        {"NUM_HEADS": 8, "BLOCK": 4096},
        8,
        {"scores_ptr": "*fp32", "out_ptr": "*i32"},
    ),
    (
        compact_caches._compact_kernel,
        {
            "COUNT": 2,
            "NUM_LAYERS": 32,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": 128,
            "BLOCK_SIZE": 16,
            "BLOCK_N": 64,
            "BLOCK_D": 128,
            "ALIGNED": True,
        },
        4,
        {"addresses_ptr": "*i64", "slots_ptr": "*i32", "starts_ptr": "*i32", "targets_ptr": "*i32"},
    ),
    (key_pairs._newest_kernel, {**PAIRS, "CHUNK": 8}, 8, {**LENGTHS, "out_ptr": "*i32"}),
    (key_pairs._nearest_kernel, PAIRS, 8, LENGTHS),
    (key_scores._norms_kernel, CACHED, 4, ADDRESSES),
    (key_scores._directions_kernel, {**CACHED, "NUM_TILES": 16}, 4, ADDRESSES),
    (key_scores._differences_kernel, CACHED, 4, ADDRESSES),
    *(
        (kernel, {**CACHED, **QUERIES, "EXPECTED": expected}, 4, ADDRESSES)
        for kernel in (query_scores._sums_kernel, query_scores._weights_kernel)
        for expected in (False, True)
    ),
    (
        fused_decode_attention._fused_decode_kernel,
        {
            **COMMON,
            **DECODE,
            "NUM_KV_HEADS": 8,
            "ROTARY_DIM": 128,
            "ALIBI": False,
            "NORM_LAST": False,
            "POSITIONS": True,
            "RING": True,
            "NORM_QUERY": True,
            "NORM_KEY": True,
            "BLOCK_G": 4,
            "FP8": False,
            "PDL": True,
            "EARLY": True,
        },
        4,
    ),
    (
        gemv._gemv_kernel,
        {
            **GEMV_PLAIN,
            "N": 4096,
            "FORMAT": dense(4096),
            "NORM": True,
            "GATED": False,
            "BIAS": True,
            "RESIDUAL": True,
            "BLOCK_N": 4,
            "BLOCK_K": 1024,
            "UNROLL": 4,
            "PDL": True,
            "EARLY": False,
        },
        4,
    ),
    (
        gemv._gemv_kernel,
        {
            **GEMV_PLAIN,
            "N": 6100,
            "FORMAT": dense(1000),
            "NORM": True,
            "GATED": True,
            "BIAS": False,
            "RESIDUAL": False,
            "BLOCK_N": 4,
            "BLOCK_K": 1024,
            "UNROLL": 1,
            "PDL": True,
            "EARLY": True,
        },
        4,
    ),
    *(
        (
            gemv._gemv_kernel,
            {
                "N": 16384,
                "FORMAT": dense(4544),
                "NORM": True,
                "CENTERED": True,
                "NORM_BIAS": True,
                "GATED": not activation,
                "BIAS": True,
                "RESIDUAL": False,
                "ACTIVATION": activation,
                "FACTOR": 0.22,
                "BLOCK_N": 4,
                "BLOCK_K": 1024,
                "UNROLL": 5,
                "BLOCK_X": 8192,
                "PDL": True,
                "EARLY": True,
            },
            4,
        )
        for activation in ("", "gelu", "gelu_tanh", "relu", "relu2", "silu", "tanh")
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
    (mask_tokens._mask_tokens_kernel, {"INDEXED": True, "PART_SIZE": 4096}, 4),
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
        fused_decode_attention._fused_decode_kernel,
        {
            **COMMON,
            **DECODE,
            "NUM_KV_HEADS": 8,
            "ROTARY_DIM": 64,
            "ALIBI": True,
            "NORM_LAST": False,
            "POSITIONS": False,
            "RING": False,
            "NORM_QUERY": True,
            "NORM_KEY": True,
            "BLOCK_G": 4,
            "FP8": True,
            "PDL": True,
            "EARLY": True,
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
    (
        step_inputs._step_inputs_kernel,
        {"DROPPED": True, "BLOCK_SIZE": 16, "TOKENS": 128, "COLUMNS": 1024},
        4,
        {**SLOT_TABLE, "slots_ptr": "*i32"},
    ),
    (step_inputs._slot_mappings_kernel, {"BLOCK_SIZE": 16, "TOKENS": 128}, 4, {"out_ptr": "*i64"}),
    (step_inputs._scatter_kernel, {"WRITES": 1024}, 4),
    (step_inputs._advance_kernel, {"ROWS": 512}, 4, {**SLOT_TABLE, "slots_ptr": "*i32"}),
    (paged_attention_prefill._prefill_kernel, {**WIDE, "BLOCK_M": 64, "BLOCK_N": 32}, 4),
    (
        paged_attention_decode._decode_kernel,
        {**DECODE, **WIDE, "BLOCK_N": 32, "SPLIT": True, "PDL": True},
        4,
    ),
    (
        fused_decode_attention._fused_decode_kernel,
        {
            **DECODE,
            **WIDE,
            "BLOCK_N": 32,
            "ROTARY_DIM": 256,
            "ALIBI": False,
            "NORM_LAST": False,
            "POSITIONS": False,
            "RING": False,
            "NORM_QUERY": True,
            "NORM_KEY": True,
            "BLOCK_G": 2,
            "FP8": False,
            "PDL": True,
            "EARLY": True,
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
    (rms_norm._rms_norm_kernel, {"SIZE": 4096, "BLOCK": 4096, "RESIDUAL": False, "PDL": True}, 8),
    (
        rms_norm._rms_norm_kernel,
        {"SIZE": 2304, "BLOCK": 4096, "RESIDUAL": True, "PDL": True},
        8,
        {"weight_ptr": "*fp32"},
    ),
    (
        gemv._gemv_kernel,
        {
            **GEMV_PLAIN,
            "N": 4096,
            "FORMAT": dense(2304),
            "NORM": True,
            "GATED": False,
            "BIAS": False,
            "RESIDUAL": False,
            "BLOCK_N": 4,
            "BLOCK_K": 1024,
            "UNROLL": 3,
            "PDL": True,
            "EARLY": False,
        },
        4,
        {"norm_ptr": "*fp32"},
    ),
    (
        sigmoid_gate._sigmoid_gate_kernel,
        {"SIZE": 512, "WIDTH": 2048, "SILU": False, "BLOCK": 512, "BLOCK_K": 2048, "PDL": True},
        4,
        {"gate_factor": "fp32", "out_factor": "fp32"},
    ),
    (activations._gated_activation_kernel, {**ACTIVATION, "GELU": True}, 4),
    (activations._gated_activation_kernel, {**ACTIVATION, "GELU": False}, 4),
    (activations._xielu_kernel, {"BLOCK": 1024}, 4, {"weights_ptr": "*fp32"}),
    (
        small_m_matmul._small_m_matmul_kernel,
        {
            **SMALL_M,
            "N": 4096,
            "FORMAT": dense(4096),
            "SPLIT_K": 2,
            "BIAS": False,
            "RESIDUAL": True,
            "BLOCK_M": 32,
            "BLOCK_N": 64,
            "BLOCK_K": 128,
            "STAGES": 4,
            "PREFETCH": "1024",
        },
        4,
    ),
    (
        small_m_matmul._small_m_matmul_kernel,
        {
            **SMALL_M,
            "N": 3000,
            "FORMAT": dense(1000),
            "SPLIT_K": 1,
            "GATED": True,
            "BIAS": True,
            "RESIDUAL": False,
            "BLOCK_M": 16,
            "BLOCK_N": 64,
            "BLOCK_K": 64,
            "EARLY": False,
        },
        4,
    ),
]
TYPES = {
    "experts_ptr": "*i32",
    "lists_ptr": "*i32",
    "counts_ptr": "*i32",
    "weights_ptr": "*fp32",
    "factor_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "best_ptr": "*fp32",
    "counter_ptr": "*i32",
    "cos_sin_ptr": "*fp32",
    "dropped_ptr": "*i32",
    "places_ptr": "*i64",
    "bits_ptr": "*i32",
    "token_ptr": "*i32",
    "settings_ptr": "*i32",
    "slots_ptr": "*i64",
    "lengths_ptr": "*i64",
    "history_ptr": "*i32",
    "chosen_ptr": "*i32",
    "longs_ptr": "*i64",
    "rows_table_ptr": "*i32",
    "row_tables_ptr": "*i32",
    "packed_ptr": "*i32",
    "table_ptr": "*i32",
    "block_table_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_start_ptr": "*i32",
    "bounds_ptr": "*i32",
    "storage_ptr": "*i32",
    "sample_slots_ptr": "*i32",
    "writes_ptr": "*i32",
    "count_ptr": "*i32",
    "token_longs_ptr": "*i64",
    "row_longs_ptr": "*i64",
    "slot_ptr": "*i64",
    "positions_ptr": "*i64",
    "slopes_ptr": "*fp32",
    "sinks_ptr": "*bf16",
    "eps": "fp32",
    "query_eps": "fp32",
    "key_eps": "fp32",
    "scale": "fp32",
    "value_scale": "fp32",
    "key_factor": "fp32",
    "value_factor": "fp32",
}
FUSED = {
    "ROTARY_DIM": 128,
    "ALIBI": False,
    "NORM_LAST": False,
    "POSITIONS": False,
    "RING": False,
    "NORM_QUERY": True,
    "NORM_KEY": True,
    "BLOCK_G": 4,
    "FP8": False,
    "PDL": True,
    "EARLY": True,
}
WRITE = {"HALF": 64, "ROTATE": True, "NORM_QUERY": True, "NORM_KEY": True, "CACHE": True}
WRITE |= {"GROUP": 8, "BLOCK_HALF": 64, "BLOCK_REST": 1, "FP8": False, "PDL": True}
PREFILL = {"GROUP": 4, "BLOCK_M": 128, "BLOCK_N": 64}
for bits, widths in ((8, INT8), (84, INT4_VALUES), (4, INT4_CACHE)):
    quantized = {**COMMON, **DECODE, **widths}
    for name in WORDS:
        quantized.pop(name)
    KERNELS += [
        (paged_attention_decode._decode_kernel, {**quantized, "SPLIT": True, "PDL": True}, 4,
         CODES[bits]),
        (fused_decode_attention._fused_decode_kernel, {**quantized, **FUSED}, 4, CODES[bits]),
        (paged_attention_prefill._prefill_kernel, {**quantized, **PREFILL}, 4, CODES[bits]),
        (qk_norm_rope_cache._qk_norm_rope_cache_kernel, {**quantized, **WRITE}, 2, CODES[bits]),
    ]  # fmt: skip
E5M2_CACHE = {"key_cache_ptr": "*fp8e5", "value_cache_ptr": "*fp8e5"}
KERNELS += [
    (paged_attention_decode._decode_kernel, {**COMMON, **DECODE, "SPLIT": True, "PDL": True}, 4,
     E5M2_CACHE),
    (paged_attention_prefill._prefill_kernel, {**COMMON, **PREFILL}, 8, E5M2_CACHE),
]  # fmt: skip
# Where ptxas 12.8 went wrong while low and high halves had a product each.
HEADS_OF_64 = {**PREFILL, "HEAD_DIM": 64, "KEY_WIDTH": 64, "BLOCK_K": 64}
HEADS_OF_64 |= {"VALUE_WIDTH": 32, "BLOCK_V": 32}
KERNELS.append(
    (
        paged_attention_prefill._prefill_kernel,
        {k: v for k, v in {**COMMON, **INT4_VALUES, **HEADS_OF_64}.items() if k not in WORDS},
        8,
        CODES[84],
    )
)
if "once" in sys.argv:
    KERNELS = list({case[0].fn: case for case in reversed(KERNELS)}.values())
for kernel, constants, warps, *own in KERNELS:
    types = {**TYPES, **(own[0] if own else {})}
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    options = {"num_warps": warps, "enable_fp_fusion": "slots_ptr" not in names}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared < 227 * 1024, kernel
    assert "ld.local" not in compiled.asm["ptx"], kernel
    assert not unwritten_reads(compiled.asm["cubin"]), kernel
    print(kernel.fn.__name__)
