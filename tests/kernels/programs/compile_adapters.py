"""Compiles adapters' kernels for a Hopper GPU, and prints their names."""

from compiling import compile_cases

from jackfield.kernels.adapters import chunks, expand, shrink
from jackfield.kernels.adapters.tiles import PROMPT_TILES, TILES, UNROLLED, split_inputs

CHUNKS = {
    "slots_ptr": "*i32",
    "slot_places_ptr": "*i32",
    "slot_starts_ptr": "*i64",
    "positions_ptr": "*i64",
    "keys_ptr": "*i64",
    "places_ptr": "*i32",
    "tokens_ptr": "*i32",
}
TABLES = {
    "low_ptr": "*fp32",
    "places_ptr": "*i32",
    "tokens_ptr": "*i32",
    "rank_rows_ptr": "*i32",
    "ranks_ptr": "*i32",
    "scales_ptr": "*fp32",
    "squares_ptr": "*fp32",
}
KERNELS = [
    (chunks._chunks_kernel, {"CHUNK": 16, "BLOCK": 256, "PDL": True}, 4, CHUNKS),
    (chunks._keys_kernel, {"BLOCK": 256}, 4, CHUNKS),
    (chunks._lay_out_kernel, {"CHUNK": 64, "BLOCK": 1024}, 8, CHUNKS),
    (chunks._chunks_kernel, {"CHUNK": 16, "BLOCK": 1024, "PDL": True}, 8, CHUNKS),
]
for dtype, inputs, bounds in (
    ("bf16", 4096, (0, 4096, 5120, 6144)),
    ("fp16", 12288, (0, 4096)),
    ("fp32", 1600, (0, 1600)),
):
    rows = [*TILES, (8192, PROMPT_TILES)]
    for most, tiles in rows if dtype == "bf16" else rows[::3]:
        splits, steps, block_k = split_inputs(tiles, inputs)
        prefetch = (
            str(steps * block_k * 2) if tiles.early and steps > 1 and dtype != "fp32" else None
        )
        common = {
            "CHUNK": 16 if most <= 1024 else 64, "BLOCK_T": 16 if most <= 1024 else 64,
            "PARTS": len(bounds) - 1, "SPLITS": splits, "ROW": most == 1, "PDL": True,
            "NORM": most == 1 and dtype != "fp16",
        }  # fmt: skip
        types = {**TABLES, **{name: f"*{dtype}" for name in ("x_ptr", "a_ptr", "b_ptr", "out_ptr")}}
        first = {
            **common, "INPUTS": inputs, "STEPS": steps, "BLOCK_L": tiles.lanes,
            "BLOCK_K": block_k, "UNROLLED": UNROLLED, "STAGES": tiles.shrink_stages,
            "PREFETCH": prefetch, "EARLY": tiles.early and (steps == 1 or prefetch is not None),
        }  # fmt: skip
        second = {
            **common, "BOUNDS": bounds, "TILES": tuple(n // tiles.outputs for n in bounds),
            "BLOCK_SPLITS": 1 << (splits - 1).bit_length(), "BLOCK_N": tiles.outputs,
            "BLOCK_R": tiles.ranks, "NORMED": inputs if common["NORM"] else None,
        }  # fmt: skip
        KERNELS.append((shrink._shrink_kernel, first, tiles.shrink_warps, types))
        KERNELS.append((expand._expand_kernel, second, tiles.expand_warps, types))
compile_cases(KERNELS)
