"""Compiles the prompt kernel for Hopper's asynchronous units, with the tiles of a launch, and
prints each case's registers and stack: what is spilled are a tile's scalars, no sums."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from uniform_registers import unwritten_reads

from jackfield.kernels.attention.hopper_prefill import TILES, _hopper_prefill_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MOST_STACK = 256
PLAIN = {
    "NUM_KV_HEADS": 8, "BLOCK_SIZE": 16, "WINDOW": 0, "CHUNK": 0, "SOFT_CAP": 0.0, "SINKS": False,
    "MIXED": False,
}  # fmt: skip
CASES = [
    (128, {"GROUP": 4}),
    (64, {"GROUP": 8, "SINKS": True, "WINDOW": 128}),
    (256, {"GROUP": 2, "SOFT_CAP": 50.0, "WINDOW": 4096}),
    (128, {"GROUP": 5, "MIXED": True, "BLOCK_SIZE": 64}),
    (128, {"GROUP": 8, "WINDOW": 8192, "CHUNK": 8192}),
    (96, {"GROUP": 1}),
]
TYPES = {
    **dict.fromkeys(("out_ptr", "query_ptr", "sinks_ptr"), "*bf16"),
    **dict.fromkeys(("scale", "value_scale"), "fp32"),
}
ALIGNED = {
    "out_ptr", "query_ptr", "stride_out_token", "stride_out_head", "stride_query_token",
    "stride_query_head",
}  # fmt: skip
names = _hopper_prefill_kernel.arg_names
for head_dim, own in CASES[: 1 if "once" in sys.argv else None]:
    block_d = triton.next_power_of_2(head_dim)
    tiles = TILES[block_d]
    box = min(own.get("BLOCK_SIZE", 16), tiles.block_n)
    constants = {
        **PLAIN, **own, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": tiles.block_n,
        "BOX": box, "STAGES": tiles.stages, "WARPGROUPS": tiles.warpgroups, "TURNS": tiles.turns,
    }  # fmt: skip
    copy = f"tensordesc<bf16[{box}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    types = {**TYPES, "key_desc": copy, "value_desc": copy}
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED}
    source = GluonASTSource(_hopper_prefill_kernel, signature, places, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.metadata.shared < 227 * 1024
    assert not unwritten_reads(compiled.asm["cubin"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run(
            [CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    print("_hopper_prefill_kernel", head_dim, own, registers, stack)
    assert stack <= MOST_STACK, usage
    for instruction in ("HGMMA", "UTMALDG", "USETMAXREG"):
        assert instruction in code, instruction
