"""`jackfield bench kernels`: each kernel at real shapes, compared with the cost of its bytes and
products.

On a GPU the calls are recorded in a CUDA graph, which hides launch overhead, and use more memory
than the L2 cache holds. On a CPU tiny shapes run in Triton's interpreter, as a check without
meaningful times.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from typing import TYPE_CHECKING

import msgspec

from ....core.errors import ConfigError
from ...flags.engine_flags import fail
from ...flags.parser import Parser
from ..report import Emitter, Record, add_output_options, environment, say, table
from ..roofline import Ceilings, given_ceilings, measure_ceilings
from ..types import rounded

if TYPE_CHECKING:
    from .case import Case

CACHE_TIMES = 3
"""Memory of a graph's calls, in L2 cache sizes."""
MAX_COPIES = 48


def make_parser() -> Parser:
    parser = Parser(
        prog="jackfield bench kernels", description="Time each kernel against its floor."
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="by name (default: all)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"),
                        default="auto", help="default: bfloat16, on a CPU float32")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20, help="timed passes (default: 20)")
    parser.add_argument("--ceilings", default="measure", help="measure, or JSON of an earlier run")
    add_output_options(parser)
    return parser


def run(argv: list[str]) -> int:
    """Return the exit status, 1 if a kernel failed."""
    args = make_parser().parse_args(argv)
    import torch

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        return _run(args, device)
    except (ImportError, ConfigError) as error:
        return fail(error)


def _run(args: argparse.Namespace, device: str) -> int:
    import torch

    from .kernel_cases import QWEN3_8B, TINY, cases

    big = device == "cuda"
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if big else "float32"
    if args.ceilings == "measure":
        ceilings = measure_ceilings(device, dtype)
    else:
        ceilings = given_ceilings(args.ceilings)
    facts = {
        **environment(device), "dtype": dtype, "sizes": "Qwen3-8B" if big else "tiny",
        "ceilings": msgspec.to_builtins(ceilings),
    }  # fmt: skip
    where = torch.device(device)
    selection = list(cases(QWEN3_8B if big else TINY, where, getattr(torch, dtype)))
    kernels = dict.fromkeys(case.kernel for case in selection)
    for name in args.kernels:
        if name not in kernels:
            raise ConfigError(f"no such kernel: {name}; there are {', '.join(kernels)}")
    emitter = Emitter(args.output, facts)
    status = 0
    for case in selection:
        if args.kernels and case.kernel not in args.kernels:
            continue
        try:
            emitter.emit(measure(case, ceilings, where, args.repeats))
        except Exception as error:
            status = 1
            traceback.print_exc()
            emitter.emit(
                {"workload": case.kernel, "at": {"shape": case.shape}, "error": repr(error)[:500]}
            )
        if big:
            torch.cuda.empty_cache()
    out = sys.stderr if emitter.output == "-" else sys.stdout
    print(kernel_table(emitter.records), file=out)
    if not big:
        say("in the interpreter: these times say nothing about speed")
    return status


def measure(case: Case, ceilings: Ceilings, device: object, repeats: int) -> Record:
    import torch

    from ..timing import graph_seconds, median_seconds

    assert isinstance(device, torch.device)
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        copies = min(MAX_COPIES, max(2, int(CACHE_TIMES * cache / case.bytes) + 1))
        works = [case.make() for _ in range(copies)]
        seconds = graph_seconds(works, device, repeats=repeats)
    else:
        work = case.make()
        seconds = median_seconds(work, device, repeats=min(repeats, 3), warmup=1)
    by_bytes = case.bytes / ceilings.copy_bytes_per_second
    by_flops = case.flops / ceilings.matmul_flops
    floor = max(by_bytes, by_flops)
    measured = {"us": 1e6 * seconds, "gb_per_second": case.bytes / seconds / 1e9}
    if case.flops:
        measured["tflops"] = case.flops / seconds / 1e12
    measured["share_of_floor"] = floor / seconds
    return {
        "workload": case.kernel, "at": {"shape": case.shape}, "measured": rounded(measured),
        "floor": {"us": float(f"{1e6 * floor:.6g}"),
                  "bound": "products" if by_flops > by_bytes else "bytes"},
    }  # fmt: skip


def kernel_table(records: list[Record]) -> str:
    rows = []
    for record in records:
        measured, floor = record.get("measured", {}), record.get("floor", {})
        share = measured.get("share_of_floor")
        rows.append([
            record["workload"], record["at"]["shape"], measured.get("us"), floor.get("us"),
            floor.get("bound", record.get("error", "")[:60]), measured.get("gb_per_second"),
            measured.get("tflops"), None if share is None else 100 * share,
        ])  # fmt: skip
    header = ["kernel", "shape", "us", "floor us", "bound by", "GB/s", "TFLOP/s", "% of floor"]
    return table(rows, header)
