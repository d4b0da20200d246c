"""Batch 1 of families that differ from Llama: milliseconds per token, and the share of the floor.

    python examples/benchmarks/families.py --output families.jsonl
    python examples/benchmarks/families.py Pythia-6.9B MPT-7B --output -

Published shapes with made-up weights, one after the other in one process. With `--compilers 7`,
that many processes first start the engines side by side, so that Triton's cache has all kernels:
each holds one model's weights at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from jackfield.entrypoints.bench.engine.session import run
from jackfield.entrypoints.bench.family_shapes import FAMILY_SHAPES
from jackfield.entrypoints.bench.report import default_output
from jackfield.entrypoints.bench.roofline import measure_ceilings
from jackfield.entrypoints.bench.workloads import ARCHITECTURES

LENGTH = 512
OPTIONS = [
    "--max-model-len", str(LENGTH), "--max-num-seqs", "2", "--max-num-batched-tokens", str(LENGTH),
    "--num-gpu-blocks-override", "80",
]  # fmt: skip
"""One request needs no more, and engines start soon."""


def release() -> int:
    """Free what ended engines leave; return the bytes that stay."""
    import torch

    gc.unfreeze()
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def start_all(names: list[str], processes: int, device: str) -> None:
    """Start each engine once, some side by side."""
    running = []
    for first in range(min(processes, len(names))):
        command = [sys.executable, __file__, *names[first::processes], "--device", device]
        output = subprocess.DEVNULL
        running.append(
            subprocess.Popen([*command, "--start-only"], stdout=output, stderr=subprocess.STDOUT)
        )
    for process in running:
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FAMILY_SHAPES)} (default: all)")
    parser.add_argument("--output", help="as jackfield bench has it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=0.5, help="of W1's lengths")
    parser.add_argument("--compilers", type=int, default=0, help="processes that compile before")
    parser.add_argument("--start-only", action="store_true", help="start the engines, no more")
    options = parser.parse_args()
    names = options.names or list(FAMILY_SHAPES)
    if unknown := set(names) - set(ARCHITECTURES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    begin = time.monotonic()
    if options.compilers:
        start_all(names, options.compilers, options.device)
        print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    ceilings = "none"
    if not options.start_only:
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        ceilings = msgspec.json.encode(measure_ceilings(options.device, dtype)).decode()
    output, status = options.output or default_output(), 0
    table = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / "lines.jsonl"
            arguments = ["W1", "--model", name, "--device", options.device, *OPTIONS]
            scale = 0.05 if options.start_only else options.scale
            repeats = ["--warmup", "0", "--repeats", "1"] if options.start_only else []
            status |= run([
                *arguments, *repeats, "--scale", str(scale), "--ceilings", ceilings,
                "--output", str(lines),
            ])  # fmt: skip
            text = lines.read_text() if lines.exists() else ""
        left = release()
        if options.start_only:
            continue
        if output == "-":
            print(text, end="")
        else:
            with open(output, "a") as file:
                file.write(text)
        for record in map(json.loads, text.splitlines()):
            if record["workload"] == "W1" and "measured" in record:
                floor, measured = record["floor"]["ms_per_token"], record["measured"]
                table.append(
                    f"{name:20} {measured['ms_per_token']:8.3f} ms  floor {floor:7.3f} ms"
                    f"  {measured['share_of_floor']:6.1%}"
                )
                print(f"{table[-1]}  ({time.monotonic() - begin:.0f} s; {left} bytes left)")
        sys.stdout.flush()
    print("\n".join(["", *table]))
    return status


if __name__ == "__main__":
    sys.exit(main())
