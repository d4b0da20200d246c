"""Prints how many instructions of a kernel of the gated delta rule, assembled for Hopper by each
ptxas that is named, read a uniform register that nothing wrote.

The first one's version decides which PTX all of them get.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from uniform_registers import unwritten_reads

from jackfield.kernels.state.delta_chunks import _delta_chunk_kernel as kernel

CONSTANTS = {
    "HEADS": 4, "GROUPS": 2, "K": 12, "V": 10, "BLOCK_K": 16, "BLOCK_V": 16, "CHUNK": 64,
    "PRECISION": "tf32",
}  # fmt: skip
TYPES = {
    "query_start_ptr": "*i32", "scale": "fp32", "rate_ptr": "*fp32", "bias_ptr": "*fp32",
    "factors_ptr": "*fp32", **dict.fromkeys(CONSTANTS, "constexpr"),
}  # fmt: skip
names = kernel.arg_names
signature = {name: TYPES.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
places = {(names.index(name),): value for name, value in CONSTANTS.items()}
source = ASTSource(fn=kernel, signature=signature, constexprs=places)
options = {"num_warps": 4, "num_stages": 1}
triton.knobs.nvidia.ptxas = sys.argv[1]
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
with tempfile.TemporaryDirectory() as folder:
    text, code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
    text.write_text(ptx)
    for assembler in sys.argv[1:]:
        command = [assembler, "-lineinfo", "--gpu-name=sm_90a", str(text), "-o", str(code)]
        subprocess.run(command, check=True)
        print(len(unwritten_reads(code.read_bytes())))
