"""Compiles kernels for a Hopper GPU, and prints their names: what the programs beside it share."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from uniform_registers import unwritten_reads

from jackfield.kernels.quant.quantized_weight import TileFormat


def dense(width):
    return TileFormat(False, width, 1, 8, width, 1, False, False, 0)


def words(width, zero, bits=4):
    return TileFormat(True, width, 32 // bits, bits, 128, 1, True, zero, 1 << (bits - 1))


FP8_TYPES = {"weight_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
INT4_TYPES = {"weight_ptr": "*i32", "zero_ptr": "*u8"}
TYPES = {
    "experts_ptr": "*i32",
    "lists_ptr": "*i32",
    "levels_ptr": "*i32",
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
    "kept_places_ptr": "*i64",
    "bits_ptr": "*i32",
    "token_ptr": "*i32",
    "settings_ptr": "*i32",
    "slots_ptr": "*i64",
    "lengths_ptr": "*i64",
    "length_ptr": "*i32",
    "prefix_ptr": "*i32",
    "prefix_partial_ptr": "*fp32",
    "prefix_lse_ptr": "*fp32",
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
"""Of arguments by name; of others by how the name ends."""


def constants_of(kernel, constants):
    """Return those that the kernel has. Raises AssertionError if it needs others, too: without a
    value they would be compiled as arguments."""
    missing = {each.name for each in kernel.params if each.is_constexpr} - constants.keys()
    assert not missing, f"{kernel.fn.__name__} needs {sorted(missing)}"
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def compile_cases(cases):
    """Compile each (kernel, constants, warps, types of its own); with `once` on the command line,
    each kernel's first case only."""
    if "once" in sys.argv:
        cases = list({case[0].fn: case for case in reversed(cases)}.values())
    for kernel, constants, warps, *own in cases:
        types = {**TYPES, **(own[0] if own else {})}
        names = kernel.arg_names
        constants = constants_of(kernel, constants)
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
