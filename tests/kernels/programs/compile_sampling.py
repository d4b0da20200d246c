"""Compiles the kernels of sampling for a Hopper GPU."""

from compiling import compile_cases

from jackfield.kernels.sampling import (
    choose_row,
    edit_logits,
    limits,
    mask_tokens,
    sample_gumbel,
    sample_tokens,
)

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
KERNELS = [
    (sample_gumbel._part_kernel, {"PART_SIZE": 2048, "PDL": True}, 4),
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
    (sample_gumbel._row_kernel, {"BLOCK": 128, "PDL": True}, 1),
    (mask_tokens._mask_tokens_kernel, {"INDEXED": True, "PART_SIZE": 4096}, 4),
]
compile_cases(KERNELS)
