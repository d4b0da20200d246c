"""Compiles every kernel over states for a Hopper GPU, and prints its name; with `once`, its first
case alone."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from uniform_registers import unwritten_reads

from jackfield.kernels.state import (
    causal_conv,
    channel_delta_chunks,
    delta_chunks,
    delta_net_step,
    delta_rule,
    gated_rms_norm,
    mamba2_step,
    selective_scan,
    ssd_chunks,
    ssd_scan,
)
from jackfield.kernels.state.rows import PLACES

CONV = {"K": 4, "BIAS": True, "SILU": True, "TOKENS": 16, "CHANNELS": 128, "PDL": True}
# Mamba 2 of 2.7 billion parameters; Bamba has states of 128, Falcon-H1 of 256.
SSD = {
    "HEADS": 80, "GROUPS": 1, "P": 64, "N": 128, "BLOCK_P": 32, "BLOCK_N": 128, "CHUNK": 32,
    "LONG": 256, "SINGLE": False, "PRECISION": "tf32", "PDL": False,
}  # fmt: skip
LARGE = {**SSD, "N": 256, "BLOCK_N": 256, "BLOCK_P": 16}
CHUNKS = {**SSD, "BLOCK_P": 64, "CHUNK": 128, "LONG": 64, "COLUMNS": 64, "STEP_HEADS": 8}
LARGE_CHUNKS = {**CHUNKS, "N": 256, "BLOCK_N": 256}
SELECTIVE = {"N": 16, "BLOCK_N": 16, "CHANNELS": 32, "TOKENS": 16, "PDL": True}
# Qwen3-Next and Qwen3.5; in float32, too.
DELTA = {
    "HEADS": 32, "GROUPS": 16, "K": 128, "V": 128, "BLOCK_K": 128, "BLOCK_V": 64, "VALUES": 32,
    "CHUNK": 64, "PRECISION": "tf32", "CHANNELS": False,
}  # fmt: skip
DELTA_SMALL = {**DELTA, "K": 12, "V": 10, "BLOCK_K": 16, "BLOCK_V": 16}
DELTA_STEP = {**DELTA, "VALUES": 16, "LONG": 1, "BOUND": None, "PDL": True}
CHANNEL_STEP = {**DELTA_STEP, "GROUPS": 32, "CHANNELS": True, "PDL": False}
# Kimi Linear.
CHANNEL_DELTA = {**DELTA, "BLOCK_K": 64, "LEVELS": 2, "BOUND": None}
DELTA_NET = {
    **DELTA_STEP, "TAPS": 4, "BLOCK_H": 2, "BLOCK_V": 128, "TILES": 1, "WIDE": 64,
}  # fmt: skip
MANY_DELTA_NETS = {**DELTA_NET, "VALUES": 32, "TILES": 4, "WIDE": 128}
DELTA_WIDE = {**DELTA, "VALUES": 16, "CHUNK": 16, "PRECISION": "ieee"}
STEP = {
    **SSD, "TAPS": 4, "CONV_BIAS": True, "NORM": False, "GATE_FIRST": False, "SCALED": False,
    "BLOCK_P": 32, "TILES": 1, "BLOCK_G": 1024, "WIDE": 128, "PDL": True,
}  # fmt: skip
LARGE_STEP = {**STEP, "SCALED": True, "N": 256, "BLOCK_N": 256, "BLOCK_P": 16}
# Nemotron-H 8B; with many rows.
NORMED_STEP = {
    **STEP, "HEADS": 128, "GROUPS": 8, "NORM": True, "GATE_FIRST": True, "BLOCK_P": 16, "TILES": 4,
}  # fmt: skip
NORM = {
    "GROUP": 8192, "SHARED": False, "GATE_FIRST": True, "SIGMOID": False, "BLOCK": 8192,
    "PDL": True,
}  # fmt: skip
KERNELS = [
    (causal_conv._conv_kernel, CONV, 4),
    (causal_conv._conv_state_kernel, {**CONV, "SINGLE": True}, 1),
    (causal_conv._conv_state_kernel, {**CONV, "SINGLE": False}, 1),
    (ssd_scan._ssd_scan_kernel, SSD, 4),
    (ssd_scan._ssd_scan_kernel, {**SSD, "SINGLE": True, "PDL": True}, 4),
    (ssd_scan._ssd_scan_kernel, LARGE, 8),
    (mamba2_step._mamba2_step_kernel, STEP, 4),
    (mamba2_step._mamba2_step_kernel, LARGE_STEP, 4),
    (mamba2_step._mamba2_step_kernel, NORMED_STEP, 4),
    (ssd_chunks._ssd_steps_kernel, CHUNKS, 4),
    (ssd_chunks._ssd_state_kernel, CHUNKS, 4, 3),
    (ssd_chunks._ssd_output_kernel, CHUNKS, 8, 3),
    (ssd_chunks._ssd_output_kernel, LARGE_CHUNKS, 8, 3),
    (selective_scan._selective_scan_kernel, SELECTIVE, 4),
    (selective_scan._selective_step_kernel, SELECTIVE, 1),
    (delta_chunks._delta_chunk_kernel, DELTA, 4),
    (delta_chunks._delta_chunk_kernel, DELTA_SMALL, 4),
    (delta_chunks._delta_chunk_kernel, DELTA_WIDE, 4),
    (delta_rule.delta_step_kernel, CHANNEL_STEP, 2),
    (delta_rule.delta_step_kernel, {**CHANNEL_STEP, "BOUND": -5.0, "LONG": 1 << 30}, 2),
    (channel_delta_chunks._channel_chunk_kernel, CHANNEL_DELTA, 8),
    (channel_delta_chunks._channel_chunk_kernel, {**CHANNEL_DELTA, "BOUND": -5.0}, 8),
    (delta_rule.delta_recurrence_kernel, DELTA, 4, 3),
    (delta_rule.delta_recurrence_kernel, {**DELTA, "GROUPS": 32, "CHANNELS": True}, 4, 3),
    (delta_rule.delta_step_kernel, {**DELTA_STEP, "strength": None}, 2),
    (delta_rule.delta_recurrence_kernel, DELTA_WIDE, 8),
    (delta_net_step._delta_net_step_kernel, DELTA_NET, 2),
    (delta_net_step._delta_net_step_kernel, MANY_DELTA_NETS, 4),
    (gated_rms_norm._gated_rms_norm_kernel, NORM, 16),
]
FLOATS = (
    "a_ptr",
    "d_ptr",
    "bias_ptr",
    "rate_ptr",
    "factors_ptr",
    "decay_ptr",
    "total_ptr",
    "key_ptr",
)
FACTORS = ("gate_factor", "step_factor", "out_factor")
TYPES = {
    "query_start_ptr": "*i32", "seq_lens_ptr": "*i32", "slots_ptr": "*i64", "chunk_ptr": "*i32",
    "counter_ptr": "*i32",
    "low": "fp32", "strength": "fp32", "high": "fp32", "scale": "fp32", "eps": "fp32",
    **dict.fromkeys(FACTORS, "fp32"),
}  # fmt: skip
if "once" in sys.argv:
    KERNELS = list({case[0].fn: case for case in reversed(KERNELS)}.values())
for kernel, constants, warps, *stages in KERNELS:
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    convolution = "weight_ptr" in names
    wide = {} if convolution else dict.fromkeys((*FLOATS, "state_ptr"), "*fp32")
    types = {**TYPES, **wide}
    narrow = "*fp32" if constants.get("PRECISION") == "ieee" else "*bf16"
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, narrow if name.endswith("_ptr") else "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    # As most launches are: tensors begin at multiples of 16 bytes.
    tensors = (name for name in names if name.endswith("_ptr") and name not in PLACES)
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in tensors}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages[0] if stages else 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared < 227 * 1024, kernel
    assert "ld.local" not in compiled.asm["ptx"], kernel
    if "once" not in sys.argv or "wgmma" in compiled.asm["ptx"]:  # By day, where it was seen.
        assert not unwritten_reads(compiled.asm["cubin"]), kernel
    print(kernel.fn.__name__)
