"""Compiles the sums over GPUs for a Hopper GPU, and prints their names."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jackfield.kernels import peer_sum

COMMON = {"SPINS": peer_sum.SPINS, "RESIDUAL": True, "PDL": True, "RANK": 1}
WORDS = {**COMMON, "BLOCK": 1024, "PLACE": peer_sum.WORD_TILE, "PROGRAMS": peer_sum.WORD_PROGRAMS}
TILES = {**COMMON, "BLOCK": 4096, "PLACE": peer_sum.TILE, "PROGRAMS": peer_sum.TILE_PROGRAMS}
POINTERS = {
    "mailboxes_ptr": "*i64", "flags_ptr": "*i64", "rounds_ptr": "*i32", "stop_ptr": "*i32",
}  # fmt: skip
KERNELS = [
    (peer_sum._words_kernel, {**WORDS, "DTYPE": tl.bfloat16, "SIZE": 2}, 8),
    (peer_sum._words_kernel, {**WORDS, "DTYPE": tl.float32, "SIZE": 4}, 8),
    (peer_sum._tiles_kernel, {**TILES, "DTYPE": tl.bfloat16, "SIZE": 2, "TWO_SHOT": False}, 8),
    (peer_sum._tiles_kernel, {**TILES, "DTYPE": tl.bfloat16, "SIZE": 4, "TWO_SHOT": True}, 8),
]
for kernel, constants, warps in KERNELS:
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr"
        if name in constants
        else POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    options = {"num_warps": warps, "num_stages": 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "ld.local" not in compiled.asm["ptx"], kernel
    print(kernel.fn.__name__)
