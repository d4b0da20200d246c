"""Compiles attention over levels, and moves between them, for a Hopper GPU."""

import torch
from compiling import compile_cases

from jackfield.core.cache.level_options import level_format
from jackfield.kernels.attention.fused_decode_floats import _fused_decode_kernel
from jackfield.kernels.attention.leveled_attention import (
    _join_all_kernel,
    _leveled_kernel,
    leveled_config,
)
from jackfield.kernels.attention.levels import level_constants
from jackfield.kernels.compaction.move_levels import _move_levels_kernel

cases = []
for head_dim, group in ((128, 4), (64, 8), (256, 2), (96, 1)):
    formats = [level_format(bits, 16, head_dim, 2) for bits in (8, 4, 4)]
    for longest in (1, 4096):
        block_m, block_n, warps, _ = leveled_config(longest, group, head_dim, torch.bfloat16)
        constants = {
            "NUM_HEADS": 8 * group, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16,
            "BLOCK_BYTES": 16 * 8 * head_dim * 2, "SOFT_CAP": 0.0, "SINKS": False,
            "SPLIT": longest == 1, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "BLOCK_K": 1 << (head_dim - 1).bit_length(), **level_constants(tuple(formats)),
        }  # fmt: skip
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
    fused = {
        "NUM_HEADS": 8 * group, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16,
        "BLOCK_BYTES": 16 * 8 * head_dim * 2, "WINDOW": 0, "CHUNK": 0, "SOFT_CAP": 0.0,
        "ALIBI": False, "ROTARY_DIM": head_dim, "NORM_LAST": False, "POSITIONS": True,
        "KEEP_QUERIES": False, "NORM_QUERY": True, "NORM_KEY": True, "MIN_TILES": 2,
        "BLOCK_M": 1 if group == 1 else 16, "BLOCK_G": group, "BLOCK_N": 32, "BLOCK_S": 8,
        "BLOCK_D": 1 << (head_dim - 1).bit_length(), "FP8": False, "PRELOAD_KV": False,
        "AHEAD": False,
        "NEW_TOKEN_PROGRAM": group != 4, "PREFETCH": True, "PDL": True, "EARLY_LAUNCH": True,
        "kept_queries_ptr": None, "kept_places_ptr": None, **level_constants(tuple(formats)),
    }  # fmt: skip
    if head_dim in (128, 96):
        cases.append((_fused_decode_kernel, fused, 4))
for parts, chosen, heads, width in ((2, 8, 8, 128), (1, 1, 9, 64), (2, 0, 8, 96)):
    move = {
        "NUM_PARTS": parts, "NUM_HEADS": heads, "CHOSEN_HEADS": chosen, "WIDTH": width,
        "BLOCK_BYTES": 16 * heads * width * 2, "BLOCK_N": 64, "BLOCK_H": 64, "ALIGNED": True,
    }  # fmt: skip
    addresses = dict.fromkeys(("sources_ptr", "targets_ptr"), "*i64")
    cases.append((_move_levels_kernel, move, 4, {**addresses, "plan_ptr": "*i32"}))
compile_cases(cases)
