"""Compiles attention over heads of 512 channels (Gemma 4) for a Hopper GPU, with the tiles and the
alignment of a launch, and prints each kernel's registers, shared memory and bytes spilled to the
stack; with `once`, for a bfloat16 cache alone."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from compiling import constants_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from uniform_registers import unwritten_reads

from jackfield.kernels.attention import (
    decode_splits,
    fused_decode_codes,
    fused_decode_config,
    fused_decode_floats,
    paged_attention_decode,
    paged_attention_prefill,
)
from jackfield.kernels.attention.levels import level_constants

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HEAD_DIM, GROUP, NUM_KV_HEADS = 512, 8, 2
HEADS = {
    "HEAD_DIM": HEAD_DIM, "GROUP": GROUP, "NUM_KV_HEADS": NUM_KV_HEADS,
    "NUM_HEADS": GROUP * NUM_KV_HEADS, "BLOCK_SIZE": 16, "WINDOW": 0, "CHUNK": 0, "SOFT_CAP": 0.0,
    "ALIBI": False, "DISTANCES": 0, "SINKS": False, "SHARED": False, "MIXED": False,
    "SEVERAL": False, "UNIFORM": False,
}  # fmt: skip
DECODE = {"MIN_TILES": 2, "BLOCK_M": 16, "BLOCK_D": HEAD_DIM, "SPLIT": True, "PDL": True}
FUSED = {
    "ROTARY_DIM": HEAD_DIM, "NORM_LAST": False, "POSITIONS": True, "KEEP_QUERIES": False,
    "NORM_QUERY": True, "NORM_KEY": True, "BLOCK_G": GROUP, "EARLY_LAUNCH": True,
    "PRELOAD_KV": False, "AHEAD": False, "NEW_TOKEN_PROGRAM": False, "PREFETCH": False,
    "kept_queries_ptr": None, "kept_places_ptr": None, "slopes_ptr": None, "slots_ptr": None,
    "levels_ptr": None, "BLOCK_BYTES": 0, **level_constants(()),
    "BLOCK_S": fused_decode_config.JOIN_ELEMENTS // (GROUP * HEAD_DIM),
}  # fmt: skip
NO_WORDS = {"key_words_ptr": None, "value_words_ptr": None}
WORDS = {"key_words_ptr": "*i32", "value_words_ptr": "*i32"}
TYPES = {
    **dict.fromkeys(("partial_ptr", "lse_ptr", "cos_sin_ptr", "slopes_ptr"), "*fp32"),
    **dict.fromkeys(
        ("block_table_ptr", "seq_lens_ptr", "query_start_ptr", "bounds_ptr", "counter_ptr"), "*i32"
    ),
    **dict.fromkeys(("slot_ptr", "positions_ptr"), "*i64"),
    **dict.fromkeys(("scale", "value_scale", "key_factor", "query_eps", "key_eps"), "fp32"),
}
# Bits of keys and of values, types of the cache, and bytes that prompts may spill: what widens
# codes of one byte does not fit beside the sums, and goes to the stack, mostly outside the loop
# over whole tiles.
FORMATS = {
    "bfloat16": (16, 16, ("*bf16", "*bf16"), 16),
    "fp8": (16, 16, ("*fp8e4nv", "*fp8e4nv"), 512),
    "int8": (8, 8, ("*i8", "*i8"), 512),
    "int8_int4": (8, 4, ("*i8", "*u8"), 512),
    "int4": (4, 4, ("*u8", "*u8"), 512),
}


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers of a thread, and bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, text
    return int(match[1]), int(match[2])


def compile_kernel(kernel, constants, types, num_warps, num_stages, most_spilled):
    names = kernel.arg_names
    constants = constants_of(kernel, constants)
    signature = {
        name: "constexpr"
        if name in constants
        else {**TYPES, **types}.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    aligned = [
        place
        for place, name in enumerate(names)
        if name not in constants and (name.endswith("_ptr") or name.startswith("stride"))
        if name not in ("stride_table", "bounds_ptr")
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled = resources(compiled.asm["cubin"])
    print(kernel.fn.__name__, registers, compiled.metadata.shared, spilled)
    assert compiled.metadata.shared <= 227 * 1024, kernel
    assert spilled <= most_spilled, kernel
    assert not unwritten_reads(compiled.asm["cubin"]), kernel


for name, (key_bits, value_bits, caches, most_spilled) in FORMATS.items():
    if "once" in sys.argv and name != "bfloat16":
        continue
    key_width, value_width = (HEAD_DIM // 2 if b == 4 else HEAD_DIM for b in (key_bits, value_bits))
    constants = {
        **HEADS, **({} if key_bits < 16 else NO_WORDS), "KEY_BITS": key_bits,
        "VALUE_BITS": value_bits, "KEY_WIDTH": key_width, "VALUE_WIDTH": value_width,
        "BLOCK_K": key_width, "FP8": name == "fp8",
    }  # fmt: skip
    types = {"key_cache_ptr": caches[0], "value_cache_ptr": caches[1], **WORDS}
    block_n, *launch = decode_splits.decode_config(HEAD_DIM, torch.bfloat16, 2)
    decode = {**constants, **DECODE, "BLOCK_N": block_n, "BLOCK_V": value_width}
    compile_kernel(paged_attention_decode._decode_kernel, decode, types, *launch, 0)
    fused = fused_decode_floats._fused_decode_kernel
    if key_bits < 16:
        fused = fused_decode_codes.fused_decode_codes_kernel
    compile_kernel(fused, {**decode, **FUSED}, types, *launch, 0)
    for queries in (2, 4, 100):
        config = paged_attention_prefill.prefill_config(
            queries, GROUP, HEAD_DIM, torch.bfloat16, False, key_bits < 16
        )
        prompt = {
            **constants, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
            "BLOCK_V": value_width // config.value_parts, "VALUE_PARTS": config.value_parts,
        }  # fmt: skip
        compile_kernel(
            paged_attention_prefill._prefill_kernel, prompt, types, config.num_warps,
            config.num_stages, most_spilled,
        )  # fmt: skip
join = {**HEADS, **DECODE, "BLOCK_N": 32, "BLOCK_S": decode_splits.MAX_SPLITS}
compile_kernel(decode_splits._join_kernel, join, {}, 8, 3, 0)
