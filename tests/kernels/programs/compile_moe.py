"""Compiles the kernels of mixtures of experts for a Hopper GPU."""

from compiling import FP8_TYPES, INT4_TYPES, compile_cases, dense, words

from jackfield.kernels.moe import (
    combine,
    expert_gemv,
    expert_matmul,
    expert_word_gemv,
    sort_tokens,
    topk_experts,
)
from jackfield.kernels.quant.quantized_weight import TileFormat

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
# GPT-OSS-20B's.
FLOATS = {
    **EXPERTS,
    "E": 32,
    "N": 2880,
    "FORMAT": TileFormat(True, 360, 8, 4, 32, 1, True, False, 0, run=32),
    "FOREIGN": False,
    "STAGES": 3,
    "PREFETCH": None,
}
FLOAT_GATE_UP = {**FLOATS, "COUNT": 1, "DIVIDE": 4, "GATED": True, "FACTOR": False}
FLOAT_GATE_UP |= {"RESIDUAL": False, "BLOCK_COUNT": 1, "SPLIT": 4, "BLOCK_K": 32}
FLOAT_DOWN = {**FLOATS, "COUNT": 4, "DIVIDE": 1, "GATED": False, "FACTOR": True, "RESIDUAL": True}
FLOAT_DOWN |= {"BLOCK_COUNT": 4, "SPLIT": 1, "BLOCK_K": 32, "PREFETCH": "1440"}
COMBINE = {"SIZE": 2048, "TOP_K": 8, "OWN": None, "BLOCK": 1024, "PDL": True}
FEW = {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 128, "STAGES": 3}
MANY = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "STAGES": 3}
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
    (combine._combine_kernel, {**COMBINE, "RESIDUAL": False}, 4),
    (combine._combine_kernel, {**COMBINE, "OWN": 64, "RESIDUAL": True}, 4, {"experts_ptr": "*i32"}),
    (expert_word_gemv._expert_word_gemv_kernel, FLOAT_GATE_UP, 4, INT4_TYPES),
    (expert_word_gemv._expert_word_gemv_kernel, {**FLOAT_DOWN, "FOREIGN": True}, 4, INT4_TYPES),
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
]
compile_cases(KERNELS)
