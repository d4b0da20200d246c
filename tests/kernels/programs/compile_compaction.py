"""Compiles the kernels that compact caches for a Hopper GPU."""

from compiling import compile_cases

from jackfield.kernels.compaction import (
    best_tokens,
    compact_caches,
    key_pairs,
    key_scores,
    query_scores,
)

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
KERNELS = [
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
    *(
        (
            key_scores._key_scores_kernel,
            {**CACHED, "mean_ptr": mean, "NUM_TILES": tiles, "SCORE": score},
            4,
            ADDRESSES,
        )
        for score, mean, tiles in (("norm", None, 1), ("direction", None, 16))
    ),
    (
        key_scores._key_scores_kernel,
        {**CACHED, "NUM_TILES": 1, "SCORE": "difference"},
        4,
        ADDRESSES,
    ),
    *(
        (
            query_scores._query_scores_kernel,
            {**CACHED, **QUERIES, "EXPECTED": expected, "WEIGHTS": weights}
            | ({} if weights else {"log_sums_ptr": None}),
            4,
            ADDRESSES,
        )
        for weights in (False, True)
        for expected in (False, True)
    ),
]
compile_cases(KERNELS)
