"""What it takes to wait for each other: launches one after another, and one kernel with barriers.

    python examples/benchmarks/launch_chain.py

A layer of one token is five kernels that wait for each other's results. This times such a chain
where there is nothing to compute: each link reads 8 KiB that the one before has written, and writes
as much. As launches, with and without programmatic dependent launch, recorded, the latter also with
a counter in place of the end of the kernel before; and as one kernel that stays on the device,
whose programs meet at a counter between links. Then again where each link also has weights of its
own, which it loads before it waits: how much of reading them is hidden?
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
from jackfield.entrypoints.bench.roofline import measure_ceilings
from jackfield.kernels.pdl import gdc_launch_dependents, gdc_wait

LINKS = 200
READ = 2048
WRITTEN = 16
"""float32 numbers: that each program reads, and writes"""
PROGRAMS = (1, 2, 4)
"""For each multiprocessor; of four warps"""
WEIGHT_BYTES = (0, 8192, 16384)
"""Of a link's own weights, that each program loads: registers hold them"""


@triton.jit
def _weights(weights_ptr, number, WEIGHTS: tl.constexpr):
    """Load this program's WEIGHTS numbers of a link's own; a zero if there are none."""
    if WEIGHTS:
        first = (number.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * WEIGHTS
        offsets = first + tl.arange(0, WEIGHTS)
        return tl.load(weights_ptr + offsets, eviction_policy="evict_first")
    else:
        return tl.zeros([1], tl.float32)


@triton.jit
def _link(source, target, weights, READ: tl.constexpr, WRITTEN: tl.constexpr):
    """Read what all programs have written; write this one's share."""
    total = tl.sum(tl.load(source + tl.arange(0, READ), cache_modifier=".cg"), axis=0)
    total += tl.sum(weights, axis=0)
    offsets = tl.program_id(0) * WRITTEN + tl.arange(0, WRITTEN)
    tl.store(target + offsets, tl.zeros([WRITTEN], tl.float32) + total * 0.0)


@triton.jit
def _read_counter(counter_ptr):
    """Read a counter; what was written before it was counted up may be read after this."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter_ptr], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _wait_for(counter_ptr, number):
    """Wait until a counter is at least `number`."""
    while _read_counter(counter_ptr) < number:
        pass
    tl.debug_barrier()


@triton.jit
def _count_up(counter_ptr):
    """Count up once all threads of this program have written."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit(do_not_specialize=["number"])
def _launched_link(
    source, target, weights_ptr, counter_ptr, number, PDL: tl.constexpr, EARLY: tl.constexpr,
    COUNTED: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """COUNTED: wait until all programs of the link before have counted, not until they have ended.
    They run by then: this one starts when each of them has. Without EARLY, when none of them waits
    any more: programs of one link wait at a time."""
    if PDL and EARLY:
        gdc_launch_dependents()
    weights = _weights(weights_ptr, number, WEIGHTS)
    if COUNTED:
        if number == 0:
            gdc_wait()
        _wait_for(counter_ptr, number * tl.num_programs(0))
        if not EARLY:
            gdc_launch_dependents()
    elif PDL:
        gdc_wait()
    _link(source, target, weights, READ, WRITTEN)
    if COUNTED:
        _count_up(counter_ptr)
    if PDL and not EARLY and not COUNTED:
        gdc_launch_dependents()


@triton.jit
def _resident_chain(
    first, second, weights_ptr, counter_ptr, LINKS: tl.constexpr, READ: tl.constexpr,
    WRITTEN: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """All programs have to run at once. counter_ptr: zero at first."""
    weights = _weights(weights_ptr, tl.full([], 0, tl.int32), WEIGHTS)
    for number in range(LINKS):
        source, target = first, second
        if number % 2 == 1:
            source, target = second, first
        _link(source, target, weights, READ, WRITTEN)
        _count_up(counter_ptr)
        # The next link's come while this one's programs wait for each other: after the count, whose
        # fence would wait for them.
        next_weights = _weights(weights_ptr, tl.minimum(number + 1, LINKS - 1), WEIGHTS)
        _wait_for(counter_ptr, (number + 1) * tl.num_programs(0))
        weights = next_weights


def chains(programs: int, num_bytes: int) -> dict[str, Callable[[], object]]:
    """Return each way to run a chain of LINKS. programs: of a link; num_bytes: of weights, that
    each loads."""
    size = max(READ, programs * WRITTEN)
    first, second = torch.zeros(2, size, device="cuda")
    weights = torch.zeros(max(1, LINKS * programs * num_bytes // 4), device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    sizes = {"READ": READ, "WRITTEN": WRITTEN, "WEIGHTS": num_bytes // 4, "num_warps": 4}

    def launches(pdl: bool, early: bool, counted: bool) -> None:
        options = {"launch_pdl": True} if pdl else {}
        counter.zero_()
        for number in range(LINKS):
            pair = (first, second) if number % 2 == 0 else (second, first)
            _launched_link[(programs,)](
                *pair, weights, counter, number, PDL=pdl, EARLY=early, COUNTED=counted, **sizes,
                **options,
            )  # fmt: skip

    def resident() -> None:
        counter.zero_()
        _resident_chain[(programs,)](first, second, weights, counter, LINKS=LINKS, **sizes)

    return {
        "launches": lambda: launches(False, False, False),
        "launches, the next one's programs wait": lambda: launches(True, False, False),
        "launches, from the start": lambda: launches(True, True, False),
        "launches, from the start, counted": lambda: launches(True, True, True),
        "launches, once none waits, counted": lambda: launches(True, False, True),
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
    rate = measure_ceilings("cuda", "bfloat16").copy_bytes_per_second
    for num_bytes in WEIGHT_BYTES:
        for share in PROGRAMS:
            programs = share * num_sms
            for name, chain in chains(programs, num_bytes).items():
                seconds = graph_seconds([chain], device) / LINKS
                emitter.emit({
                    "workload": "chain of empty kernels",
                    "at": {"programs": programs, "weights_bytes": num_bytes, "as": name},
                    "measured": {"link_us": round(1e6 * seconds, 3)},
                    "floor": {"weights_us": round(1e6 * programs * num_bytes / rate, 3)},
                })  # fmt: skip
    rows = [
        [*line["at"].values(), *line["measured"].values(), *line["floor"].values()]
        for line in emitter.records
    ]
    print(table(rows, ["programs", "weights_bytes", "as", "link_us", "weights_us"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
