"""`jackfield bench startup`: time from process start to the first token (W6), cold and warm.

Cold: Triton's cache of compiled kernels is empty. Warm: it contains the cold start's. The system's
file cache is not cleared: to have the checkpoint in memory, run twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from ...flags.parser import Parser
from ..report import Emitter, add_output_options, summary
from .subprocess_run import COMMAND, run_process


def run(argv: list[str], command: Sequence[str] = COMMAND) -> int:
    """command: starts an engine in its own process."""
    parser = Parser(
        prog="jackfield bench startup",
        description="Start an engine in fresh processes: to ready, to the first token (W6).",
        epilog="Other options go to `jackfield bench run` as they are (--model, --dtype, …).",
    )
    parser.add_argument("--repeats", type=int, default=1, help="warm starts")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one start")
    add_output_options(parser)
    args, rest = parser.parse_known_args(argv)
    emitter = Emitter(args.output, {})
    with tempfile.TemporaryDirectory(prefix="jackfield-triton-") as cache:
        for number in range(1 + args.repeats):
            records, status = run_process(
                ["W1", "--ceilings", "none", "--deadline", "0.001", *rest],
                command=command,
                environment={"TRITON_CACHE_DIR": cache},
                timeout=args.timeout,
            )
            started = [record for record in records if record["workload"] == "start"]
            if not started:
                return status or 1
            at = {"caches": "warm" if number else "cold"}
            emitter.emit({**started[0], "workload": "W6", "at": at})
    print(summary(emitter.records))
    return 0
