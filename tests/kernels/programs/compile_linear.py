"""Compiles the kernels of linear layers and their weights for a Hopper GPU."""

from compiling import FP8_TYPES, INT4_TYPES, compile_cases, dense, words

from jackfield.kernels.linear import (
    gemv,
    int4_gemv,
    normed_linear,
    quant_matmul,
    small_m_matmul,
    split_k_sum,
)
from jackfield.kernels.quant import dequantize, quantize_rows
from jackfield.kernels.quant.quantized_weight import TileFormat

FP8 = {
    "FORMAT": TileFormat(True, 4096, 1, 8, 4096, 1, False, False, 0),
    "N": 4096,
    "BIAS": False,
    "RESIDUAL": True,
}
INT4 = {**FP8, "FORMAT": words(512, True), "WIDTH": 512, "GROUP_SIZE": 128, "ZERO": True}
NVFP4 = {**INT4, "GROUP_SIZE": 16, "ZERO": False}
GEMV_PLAIN = {
    "CENTERED": False,
    "NORM_BIAS": False,
    "SUMMED": False,
    "AHEAD": False,
    "ACTIVATION": "",
    "BLOCK_X": 1,
    "FACTOR": 1.0,
}
GEMV = {
    **GEMV_PLAIN,
    "UNROLL": 2,
    "NORM": True,
    "GATED": False,
    "PDL": True,
    "EARLY_LAUNCH": True,
    "BLOCK_N": 4,
}
SMALL_M = {"GATED": False, "STAGES": 3, "PDL": True, "EARLY_LAUNCH": True, "PREFETCH": None}
KERNELS = [
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
        {**INT4, **GEMV, "FLOATS": False, "BLOCK_K": 64, "WARPS": 4, "STAGES": 3},
        4,
        INT4_TYPES,
    ),
    (
        int4_gemv._int4_gemv_kernel,
        {**NVFP4, **GEMV, "FLOATS": True, "BLOCK_K": 16, "WARPS": 4, "STAGES": 3},
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
            "EARLY_LAUNCH": False,
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
            "EARLY_LAUNCH": True,
            "AHEAD": True,
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
                "SUMMED": summed,
                "GATED": not activation,
                "BIAS": True,
                "RESIDUAL": False,
                "ACTIVATION": activation,
                "FACTOR": 0.22,
                "BLOCK_N": 4,
                "BLOCK_K": 1024,
                "UNROLL": 5,
                "BLOCK_X": 1 if summed else 8192,
                "PDL": True,
                "EARLY_LAUNCH": True,
                "AHEAD": summed,
            },
            4,
            {"norm_bias_ptr": "*fp32", "sums_ptr": "*fp32"} if summed else {},
        )
        for activation in ("", "gelu", "gelu_tanh", "relu", "relu2", "silu", "tanh")
        for summed in ((False, True) if activation in ("", "gelu") else (False,))
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
            "EARLY_LAUNCH": False,
        },
        4,
        {"norm_ptr": "*fp32"},
    ),
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
            "EARLY_LAUNCH": False,
        },
        4,
    ),
    (
        normed_linear._normed_linear_kernel,
        {"TOKENS": 4, "N": 128, "SIZE": 2048, "BIAS": True, "BLOCK": 2048, "PDL": True},
        4,
    ),
]
compile_cases(KERNELS)
