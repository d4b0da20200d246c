"""Compiles the kernels of a step's inputs, drafts, norms and activations for a Hopper GPU."""

from compiling import compile_cases

from jackfield.kernels import activations, embedding, rms_norm, sigmoid_gate
from jackfield.kernels.step import (
    decode_inputs,
    drafts,
    lookup_ngrams,
    step_inputs,
    suffix_drafts,
    written_tokens,
)

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
SUFFIX = {
    **{f"{name}_ptr": "*i32" for name in ("drafts", "counts", "own", "own_cells", "shared")},
    **{f"{name}_ptr": "*i64" for name in ("own_base", "own_row_cells", "own_end", "token_owners")},
    **{
        f"{name}_ptr": "*i64"
        for name in ("base", "row_cells", "owners", "other_owners", "first", "end")
    },
    **{name: "i32" for name in ("own_size", "own_buckets", "shared_size", "shared_buckets")},
    **{name: "i32" for name in ("size", "num_buckets", "most", "num_drafts")},
    "shared_cells_ptr": "*i32",
    "tokens_ptr": "*i32",
    "cells_ptr": "*i32",
    "factor": "fp32",
    "least": "fp32",
}
SLOT_TABLE = {"lengths_ptr": "*i32"}
ACTIVATION = {"SIZE": 1000, "BLOCK": 1024, "PDL": True}
KERNELS = [
    (
        decode_inputs._decode_inputs_kernel,
        {"DROPPED": True, "BLOCK_SIZE": 16, "BLOCK": 1024, "PDL": True},
        4,
        SLOT_TABLE,
    ),
    (
        lookup_ngrams._lookup_kernel,
        {"LEAST": 2, "MOST": 4, "DRAFTS": 8, "TOKENS": 2048},
        8,
        {**DRAFTS, "drafts_ptr": "*i32", "counts_ptr": "*i32", "lengths_ptr": "*i64"},
    ),
    (suffix_drafts._note_kernel, {"PLACES": 256}, 4, SUFFIX),
    *(
        (
            suffix_drafts._drafts_kernel,
            {"OTHERS": others, "DEPTH": 24, "DRAFTS": 8, "LANES": 16},
            1,
            SUFFIX,
        )
        for others in range(3)
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
        step_inputs._step_inputs_kernel,
        {"DROPPED": True, "BLOCK_SIZE": 16, "TOKENS": 128, "COLUMNS": 1024},
        4,
        {**SLOT_TABLE, "slots_ptr": "*i32"},
    ),
    (step_inputs._slot_mappings_kernel, {"BLOCK_SIZE": 16, "TOKENS": 128}, 4, {"out_ptr": "*i64"}),
    (step_inputs._scatter_kernel, {"WRITES": 1024}, 4),
    (step_inputs._advance_kernel, {"ROWS": 512}, 4, {**SLOT_TABLE, "slots_ptr": "*i32"}),
    (
        written_tokens._written_tokens_kernel,
        {"PDL": True},
        4,
        {"ring_ptr": "*i32", "runs_ptr": "*i32", "places": "i32", "last": "i32"},
    ),
    (
        embedding._embedding_kernel,
        {"SIZE": 1600, "SCALED": True, "PLACED": True, "BLOCK": 2048, "PDL": True},
        4,
        {"token_ids_ptr": "*i64", "factor": "fp32"},
    ),
    (rms_norm._rms_norm_kernel, {"SIZE": 4096, "BLOCK": 4096, "RESIDUAL": False, "PDL": True}, 8),
    (
        rms_norm._rms_norm_kernel,
        {"SIZE": 2304, "BLOCK": 4096, "RESIDUAL": True, "PDL": True},
        8,
        {"weight_ptr": "*fp32"},
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
]
compile_cases(KERNELS)
