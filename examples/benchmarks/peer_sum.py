"""Microseconds of a sum over ranks, by the bytes of a term and the way that it takes.

    python examples/benchmarks/peer_sum.py --ranks 2

Starts a process for each GPU. 64 sums with a residual are recorded in a graph, which is replayed;
the least of ten replays counts, on rank 0. Prints a table, and lines of JSON with --output.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUMS = 64
REPLAYS = 10
KILOBYTES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def measured(call: Callable[[], Any], recorder: Any, kept: list[Any]) -> float:
    """Return microseconds of a call in a graph, which is kept as long as others are recorded."""
    import torch

    def many() -> None:
        for _ in range(SUMS):
            call()

    many()
    torch.cuda.synchronize()
    replay = recorder(many)
    kept.append(replay)
    best = float("inf")
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return 1000 * best / SUMS


def rank_main(rank: int, size: int, port: int, kilobytes: list[int]) -> None:
    """Measure on one rank; rank 0 prints."""
    import torch

    from jackfield.core.config import EngineConfig
    from jackfield.core.parallel.join import join, leave, rank_device
    from jackfield.core.registry import load_plugins
    from jackfield.core.worker.graphs.recorder import CudaRecorder
    from jackfield.kernels.collectives.peer_sum import TILE, WORD_PROGRAMS, WORD_TILE, peer_sum
    from jackfield.plugins.collectives.builtin import Nccl

    config = EngineConfig(device="cuda", tensor_parallel_size=size, collectives="peer_memory")
    ranks = join(config, load_plugins(), rank=rank, address=("127.0.0.1", port))
    device = rank_device(config, rank)
    torch.cuda.set_device(device)
    group: Any = ranks.tensor
    recorder = CudaRecorder(device, ranks)
    kept: list[Any] = []
    for each in kilobytes:
        x = torch.ones(each * 512, device=device, dtype=torch.bfloat16)
        residual = torch.zeros_like(x)

        def ways(x: Any = x, residual: Any = residual) -> dict[str, Callable[[], Any]]:
            boxes = group._mailboxes
            found: dict[str, Callable[[], Any]] = {
                "nccl": lambda: Nccl.all_reduce(group, x, residual)
            }
            if boxes is not None:
                found["one_shot"] = lambda: peer_sum(x, residual, boxes, "one_shot")
                if x.numel() * 2 >= 4 * TILE:
                    found["two_shot"] = lambda: peer_sum(x, residual, boxes, "two_shot")
                if x.numel() * 2 <= 4 * WORD_PROGRAMS * WORD_TILE:
                    found["words"] = lambda: peer_sum(x, residual, boxes, "words")
            return found

        times = {name: measured(call, recorder, kept) for name, call in ways().items()}
        if rank == 0:
            print(json.dumps({"kilobytes": each, **times}), flush=True)
    kept.clear()
    del recorder
    torch.cuda.synchronize()
    leave(ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=list(KILOBYTES))
    parser.add_argument("--output", type=Path, help="append lines of JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.rank, args.ranks, args.port, args.kilobytes)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sizes = [str(each) for each in args.kilobytes]
    command = [sys.executable, __file__, "--ranks", str(args.ranks), "--port", str(port)]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--kilobytes", *sizes],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(args.ranks)
    ]  # fmt: skip
    lines = []
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if line.startswith("{"):
            lines.append(line)
            row = json.loads(line)
            cells = "  ".join(f"{k} {v:7.2f}" for k, v in row.items() if k != "kilobytes")
            print(f"{row['kilobytes']:>6} kB  {cells}", flush=True)
    if any([rank.wait() for rank in ranks]):
        sys.exit("a rank has failed")
    if args.output:
        with args.output.open("a") as file:
            file.writelines(lines)


if __name__ == "__main__":
    main()
