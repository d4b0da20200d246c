"""How long the launch thread of a running server waits for the interpreter lock, on Linux.

    jackfield bench serve traffic --model Qwen3-0.6B --engine jackfield &
    python examples/benchmarks/lock_waits.py --pid $(pgrep -f 'cli.main serve') --output -

Reads what the thread's system call is, some 100,000 times a second, from /proc: a wait on a word
inside of the interpreter's own memory is one for its lock; the word elsewhere on which it waits
most is the queue of steps, so what lies between two such waits is a launch. Costs the server
nothing, and this process a core. Needs the right to trace the other process.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from jackfield.core.worker.threads import LAUNCH_THREAD
from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment, table

FUTEX = b"202"
"""Number of the system call on x86-64."""
SHORTEST = 2e-4
"""Seconds; less is no launch of a step, but a job that ends at once."""


class Sample(NamedTuple):
    """What the thread did at a time."""

    seconds: float
    word: int
    """Address it waits on; 0: it does not wait."""


class Launch(NamedTuple):
    """One stretch between two waits for work."""

    seconds: float
    lock_seconds: float
    num_waits: int


def launch_thread(pid: int) -> Path:
    """Return the folder in /proc of the launch thread."""
    for folder in Path(f"/proc/{pid}/task").iterdir():
        if (folder / "comm").read_text().strip() == LAUNCH_THREAD:
            return folder
    raise SystemExit(f"process {pid} has no thread named {LAUNCH_THREAD!r}")


def take_samples(thread: Path, seconds: float) -> list[Sample]:
    """Read the thread's system call over and over."""
    samples = []
    file = os.open(thread / "syscall", os.O_RDONLY)
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        number, _, rest = os.pread(file, 256, 0).partition(b" ")
        word = int(rest.split(b" ", 1)[0], 16) if number == FUTEX else 0
        samples.append(Sample(now, word))
    os.close(file)
    return samples


def interpreter_memory(pid: int) -> list[range]:
    """Return where the interpreter's own data lie: its program or library, and what follows it."""
    found: list[range] = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split()
        begin, end = (int(each, 16) for each in fields[0].split("-"))
        path = Path(fields[5]).name if len(fields) > 5 else ""
        follows = not path and bool(found) and found[-1].stop == begin
        if path.startswith(("python3", "libpython3")) or follows:
            found.append(range(begin, end))
    return found


def find_launches(samples: list[Sample], lock_memory: list[range]) -> list[Launch]:
    """Divide the samples into launches."""
    waits = collections.Counter(sample.word for sample in samples if sample.word)
    lock = {word for word in waits if any(word in each for each in lock_memory)}
    queue = max((word for word in waits if word not in lock), key=waits.__getitem__, default=None)
    launches = []
    begin: float | None = None
    lock_seconds, num_waits, waiting = 0.0, 0, False
    for sample, after in itertools.pairwise(samples):
        if sample.word == queue:
            if begin is not None:
                launches.append(Launch(sample.seconds - begin, lock_seconds, num_waits))
            begin, lock_seconds, num_waits, waiting = None, 0.0, 0, False
            continue
        begin = sample.seconds if begin is None else begin
        num_waits += sample.word in lock and not waiting
        waiting = sample.word in lock
        lock_seconds += waiting * (after.seconds - sample.seconds)
    return [launch for launch in launches if launch.seconds >= SHORTEST]


def percentile(values: list[float], share: float) -> float:
    """Return that percentile, in milliseconds."""
    return float(f"{1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))]:.3g}")


def main() -> None:
    """Sample, and emit a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--workload", default="traffic", help="what the server is loaded with")
    add_output_options(parser)
    args = parser.parse_args()
    samples = take_samples(launch_thread(args.pid), args.seconds)
    launches = find_launches(samples, interpreter_memory(args.pid))
    if not launches:
        raise SystemExit("the launch thread never waited for work, or had none")
    waits, lengths = [each.lock_seconds for each in launches], [each.seconds for each in launches]
    measured = {
        "launches": len(launches),
        "samples_per_second": round(len(samples) / args.seconds),
        "waits_per_launch": float(f"{sum(x.num_waits for x in launches) / len(launches):.3g}"),
        "lock_wait_mean_ms": float(f"{1e3 * sum(waits) / len(waits):.3g}"),
        "lock_wait_p50_ms": percentile(waits, 0.5),
        "lock_wait_p99_ms": percentile(waits, 0.99),
        "launch_p50_ms": percentile(lengths, 0.5),
        "launch_p99_ms": percentile(lengths, 0.99),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    emitter = Emitter(args.output, environment(device))
    emitter.emit({"workload": f"lock waits, {args.workload}", "measured": measured})
    print(table(sorted(measured.items()), ("what", "number")))


if __name__ == "__main__":
    main()
