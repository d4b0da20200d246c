"""Compiles attention over levels for a Hopper GPU, with tiles of decode steps and of prompts."""

import torch
from compiling import compile_cases

from jackfield.core.cache.level_options import level_format
from jackfield.kernels.attention.leveled_attention import (
    _join_all_kernel,
    _leveled_kernel,
    leveled_config,
)

cases = []
for head_dim, group in ((128, 4), (64, 8), (256, 2), (96, 1)):
    formats = [level_format(bits, 16, head_dim, 2) for bits in (8, 4, 4)]
    for longest in (1, 4096):
        block_m, block_n, warps, _ = leveled_config(longest, group, head_dim, torch.bfloat16)
        constants = {
            "NUM_HEADS": 8 * group, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16,
            "BLOCK_BYTES": 16 * 8 * head_dim * 2, "LEVELS": 3, "SOFT_CAP": 0.0, "SINKS": False,
            "SPLIT": longest == 1, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "BLOCK_K": 1 << (head_dim - 1).bit_length(),
        }  # fmt: skip
        for number, form in enumerate(formats, 1):
            constants |= {f"BITS_{number}": form.bits, f"TOKENS_{number}": form.tokens}
        types = {"partial_ptr": "*fp32"} if longest == 1 else {"partial_ptr": "*bf16"}
        cases.append((_leveled_kernel, constants, warps, types))
    join = {
        "NUM_HEADS": 8 * group,
        "HEAD_DIM": head_dim,
        "SINKS": True,
        "BLOCK_S": 8,
        "BLOCK_K": 128,
    }
    cases.append((_join_all_kernel, join, 4))
compile_cases(cases)
