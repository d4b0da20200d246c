"""Compiles every kernel of latent attention for a Hopper GPU, and prints its name; with `once`, its
first case alone."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from uniform_registers import unwritten_reads

from jackfield.kernels.attention.latent import (
    head_matmul,
    latent_context,
    latent_decode,
    latent_inputs,
    latent_prompt,
)
from jackfield.kernels.attention.levels import level_constants
from jackfield.kernels.indexer import index_choice, index_inputs, index_scores

LEVELS = {
    **level_constants(((8, 30), (4, 56), (16, 16))), "CHANNELS": 64, "BLOCK_BYTES": 16 * 576 * 2,
}  # fmt: skip
# DeepSeek-V2-Lite: 16 heads; V3: 128 (or 16 of them).
SIZES = {
    "LATENT_DIM": 512, "ROPE_DIM": 64, "NOPE_DIM": 128, "VALUE_DIM": 128, "BLOCK_SIZE": 16,
    "BLOCK_L": 512, "BLOCK_R": 64, "BLOCK_K": 128, "BLOCK_V": 128, **level_constants(()),
    "CHANNELS": 1, "BLOCK_BYTES": 0,
}  # fmt: skip
LITE, V3 = ({**SIZES, "NUM_HEADS": heads} for heads in (16, 128))
DECODE = {"SPLIT": True, "MIN_TILES": 2, "MIXED": False, "PDL": True, "BLOCK_N": 32}
MIXED = {**DECODE, "MIXED": True, "PDL": False}
JOIN = {**DECODE, "BLOCK_S": 128, "BLOCK_L": 128}
PROMPT = {"MIXED": True, "CONTEXT": True, "BLOCK_M": 128, "BLOCK_N": 64}
# GLM-4.7 Flash.
GLM = {"NUM_HEADS": 20, "NOPE_DIM": 192, "VALUE_DIM": 256, "BLOCK_K": 256, "BLOCK_V": 256}
INPUTS = {"ROTATE": True, "INTERLEAVED": True, "GROUP": 8, "BLOCK_LATENT": 512, "BLOCK_HALF": 32}
ABSORB = {"IN": 128, "OUT": 512, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "PDL": True}
UP = {**ABSORB, "IN": 512, "OUT": 128, "BLOCK_N": 16}
# DeepSeek V3.2: 64 heads of an indexer; GLM-5: 32.
INDEX = {
    "NUM_HEADS": 64, "INDEX_DIM": 128, "TILES": 8, "BLOCK_SIZE": 16, "BLOCK_H": 64, "BLOCK_N": 128,
    "BLOCK_D": 128,
}  # fmt: skip
INDEX_INPUTS = {
    "ROPE_DIM": 64, "INTERLEAVED": False, "GROUP": 8, "BLOCK_DIM": 128, "BLOCK_HALF": 32,
    "PDL": True,
}  # fmt: skip
scores = index_scores._index_scores_kernel
decode, join = latent_decode._latent_decode_kernel, latent_decode._latent_join_kernel
context, prompt = latent_context._latent_context_kernel, latent_prompt._latent_prompt_kernel
KERNELS = [
    (latent_inputs._latent_inputs_kernel, {**LITE, **INPUTS, "PDL": True}, 4, 3),
    (head_matmul._head_matmul_kernel, {**ABSORB, "stride_weight_out": 1}, 4, 3),
    (
        head_matmul._head_matmul_kernel,
        {**UP, "stride_weight_in": 1, "BLOCK_M": 16, "BLOCK_K": 512},
        4,
        3,
    ),
    (head_matmul._head_matmul_kernel, {**UP, "stride_weight_in": 1}, 4, 3),
    (decode, {**LITE, **DECODE, "BLOCK_M": 16}, 4, 4),
    (decode, {**V3, **DECODE, "BLOCK_SIZE": 1, "BLOCK_M": 64, "BLOCK_N": 64}, 8, 3),
    (index_inputs._index_inputs_kernel, {**INDEX, **INDEX_INPUTS}, 4, 3),
    (scores, {**INDEX, "BLOCK_Q": 1}, 4, 2),
    (scores, {**INDEX, "BLOCK_Q": 16}, 4, 2),
    (scores, {**INDEX, "NUM_HEADS": 32, "BLOCK_H": 32, "BLOCK_Q": 16}, 4, 2),
    (index_choice._index_choice_kernel, {"BLOCK_SIZE": 16, "BLOCK": 4096}, 16, 3),
    (index_choice._part_choice_kernel, {"BLOCK": 4096}, 16, 3),
    (decode, {**V3, **MIXED, "BLOCK_M": 64}, 8, 2),
    (join, {**LITE, **JOIN}, 4, 3),
    (context, {**LITE, "MIXED": True, "HEADS": 16, "BLOCK_M": 64, "BLOCK_N": 32}, 8, 2),
    (context, {**V3, "MIXED": False, "HEADS": 64, "BLOCK_M": 64, "BLOCK_N": 32}, 8, 2),
    (decode, {**LITE, **DECODE, **LEVELS, "BLOCK_M": 16}, 4, 2),
    (decode, {**V3, **MIXED, **LEVELS, "BLOCK_M": 64}, 8, 2),
    (join, {**LITE, **JOIN, **LEVELS}, 4, 3),
    (context, {**LITE, **LEVELS, "MIXED": True, "HEADS": 16, "BLOCK_M": 64, "BLOCK_N": 32}, 8, 2),
    (context, {**V3, **LEVELS, "MIXED": False, "HEADS": 64, "BLOCK_M": 64, "BLOCK_N": 32}, 8, 2),
    (prompt, {**LITE, **PROMPT}, 8, 3),
    (prompt, {**LITE, **PROMPT, "CONTEXT": False, "BLOCK_M": 64}, 4, 2),
    (prompt, {**LITE, **GLM, **PROMPT, "BLOCK_M": 64, "BLOCK_N": 32}, 4, 2),
]
FLOATS = ("partial_ptr", "lse_ptr", "cos_sin_ptr", "scores_ptr", "weights_ptr", "best_ptr")
INTS = (
    "block_table_ptr", "seq_lens_ptr", "query_start_ptr", "bounds_ptr", "slots_ptr", "counts_ptr",
    "levels_ptr", "places_ptr",
)  # fmt: skip
TYPES = {
    **dict.fromkeys(FLOATS, "*fp32"), **dict.fromkeys(INTS, "*i32"),
    **dict.fromkeys(("positions_ptr", "slot_ptr"), "*i64"), "scale": "fp32", "eps": "fp32",
}  # fmt: skip
if "once" in sys.argv:
    KERNELS = list({case[0].fn: case for case in reversed(KERNELS)}.values())
for kernel, constants, warps, stages in KERNELS:
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    # The decode kernel writes float32 where it splits.
    wide = {"out_ptr": "*fp32"} if kernel is decode else {}
    types = {**TYPES, **wide}
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name] != "constexpr" and (name.endswith("_ptr") or name.startswith("stride"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": constants.get("PDL", False)}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared < 227 * 1024, (kernel, compiled.metadata.shared)
    assert "ld.local" not in compiled.asm["ptx"], kernel
    if "once" not in sys.argv or "wgmma" in compiled.asm["ptx"]:  # By day, where it was seen.
        assert not unwritten_reads(compiled.asm["cubin"]), kernel
    print(kernel.fn.__name__)
