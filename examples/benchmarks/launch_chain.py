"""What it takes to wait for each other: launches one after another, and one kernel with barriers.

    python examples/benchmarks/launch_chain.py

A layer of one token is five kernels that wait for each other's results. This times such a chain
where there is nothing to compute: each link reads 8 KiB that the one before has written, and writes
as much. As launches, with and without programmatic dependent launch, recorded; and as one kernel
that stays on the device, whose programs meet at a counter between links.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from jackfield.entrypoints.bench.kernels.timing import graph_seconds
from jackfield.entrypoints.bench.report import Emitter, environment, table
from jackfield.kernels.pdl import gdc_launch_dependents, gdc_wait

LINKS = 200
READ = 2048
WRITTEN = 16
"""float32 numbers: that each program reads, and writes"""
PROGRAMS = (1, 2, 4)
"""For each multiprocessor; of four warps"""


@triton.jit
def _link(source, target, READ: tl.constexpr, WRITTEN: tl.constexpr):
    """Read what all programs have written; write this one's share."""
    total = tl.sum(tl.load(source + tl.arange(0, READ), cache_modifier=".cg"), axis=0)
    offsets = tl.program_id(0) * WRITTEN + tl.arange(0, WRITTEN)
    tl.store(target + offsets, tl.zeros([WRITTEN], tl.float32) + total * 0.0)


@triton.jit
def _launched_link(
    source, target, PDL: tl.constexpr, EARLY: tl.constexpr, READ: tl.constexpr,
    WRITTEN: tl.constexpr,
):  # fmt: skip
    if PDL and EARLY:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    _link(source, target, READ, WRITTEN)
    if PDL and not EARLY:
        gdc_launch_dependents()


@triton.jit
def _resident_chain(
    first, second, counter_ptr, LINKS: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr
):
    """All programs have to run at once. counter_ptr: zero at first."""
    for number in range(LINKS):
        source, target = first, second
        if number % 2 == 1:
            source, target = second, first
        _link(source, target, READ, WRITTEN)
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release")
        arrived = (number + 1) * tl.num_programs(0)
        while tl.atomic_add(counter_ptr, 0, sem="acquire") < arrived:
            pass
        tl.debug_barrier()


def chains(programs: int) -> dict[str, Callable[[], object]]:
    """Return each way to run a chain of LINKS. programs: of a link."""
    size = max(READ, programs * WRITTEN)
    first, second = torch.zeros(2, size, device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    sizes = {"READ": READ, "WRITTEN": WRITTEN, "num_warps": 4}

    def launches(pdl: bool, early: bool) -> None:
        options = {"launch_pdl": True} if pdl else {}
        for number in range(LINKS):
            pair = (first, second) if number % 2 == 0 else (second, first)
            _launched_link[(programs,)](*pair, PDL=pdl, EARLY=early, **sizes, **options)

    def resident() -> None:
        counter.zero_()
        _resident_chain[(programs,)](first, second, counter, LINKS=LINKS, **sizes)

    return {
        "launches": lambda: launches(False, False),
        "launches, the next one's programs wait": lambda: launches(True, False),
        "launches, from the start": lambda: launches(True, True),
        "one kernel": resident,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", help="a file of JSON lines, or - for standard output")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("launch_chain.py: there is no CUDA device here to measure", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    emitter = Emitter(args.output, environment("cuda"))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    for share in PROGRAMS:
        for name, chain in chains(share * num_sms).items():
            emitter.emit({
                "workload": "chain of empty kernels",
                "at": {"programs": share * num_sms, "as": name},
                "measured": {"link_us": round(1e6 * graph_seconds([chain], device) / LINKS, 3)},
            })  # fmt: skip
    rows = [[*line["at"].values(), *line["measured"].values()] for line in emitter.records]
    print(table(rows, ["programs", "as", "link_us"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
