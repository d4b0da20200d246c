"""What several GPUs of one host give: the tests that need them, and a table beside vLLM.

    python examples/benchmarks/ranks.py --gpus 2 --output docs/benchmarks/ranks.jsonl
    python examples/benchmarks/ranks.py --gpus 4 --engines jackfield --skip-tests

Each case is `compare` of engines.py with the same options for each engine that is installed:
Qwen3-8B on one GPU, divided in each layer (tensor parallelism) and by its layers (pipeline
parallelism), in copies (data parallelism; vLLM's Python API has none for such a model), and
Qwen3-30B-A3B with its experts divided whole. Weights are made up. With `--print`, the commands
alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/core/parallel/test_cuda_ranks.py",
    "tests/plugins/executors/test_ranks.py",
    "tests/plugins/executors/test_ray_gpus.py",
)
KITS = ("tests/plugins/conformance/test_collectives_kit.py", "-k", "Nccl or PeerMemory")
ENGINES = "jackfield.examples.benchmarks.engines"
STEPS = ("--batch-sizes", "64", "256")
WORKLOADS = ("W1", "decode", "W2")


class Case(NamedTuple):
    """One row of the table."""

    name: str
    model: str
    options: dict[str, int | bool]
    """Engine options, which vLLM has by the same names."""
    workloads: tuple[str, ...] = WORKLOADS
    requests: int = 256
    peers: bool = True
    """Whether other engines run it, too."""

    def command(self, engines: Sequence[str], output: str | None, budget: float) -> list[str]:
        """Return the command line."""
        flags = [
            f"--{'' if value else 'no-'}{name.replace('_', '-')}"
            if isinstance(value, bool)
            else f"--{name.replace('_', '-')}={value}"
            for name, value in self.options.items()
        ]
        chosen = engines if self.peers else ["jackfield"]
        return [
            sys.executable, "-m", ENGINES, "compare", *self.workloads,
            "--engines", *chosen, "--budget-s", str(budget), "--model", self.model, *STEPS,
            "--requests", str(self.requests), *flags, "--peer-options", json.dumps(self.options),
            *(["--output", output] if output else []),
        ]  # fmt: skip


def cases(gpus: int) -> list[Case]:
    """Return the cases for a host of so many GPUs, a power of two."""
    dense, mixture = "Qwen3-8B", "Qwen3-30B-A3B"
    stages = {"pipeline_parallel_size": 2, "tensor_parallel_size": gpus // 2}
    experts = {"tensor_parallel_size": gpus, "enable_expert_parallel": True}
    return [
        Case("one GPU", dense, {}),
        Case(f"tensor parallel {gpus}", dense, {"tensor_parallel_size": gpus}),
        Case(f"stages 2 of {gpus // 2}", dense, stages),
        Case(
            f"data parallel {gpus}", dense, {"data_parallel_size": gpus}, ("W2",), 256 * gpus,
            peers=False,
        ),
        Case("experts, one GPU", mixture, {}),
        Case(f"expert parallel {gpus}", mixture, experts),
    ]  # fmt: skip


def installed() -> list[str]:
    """Return the engines to compare."""
    from jackfield.examples.benchmarks.engines import installed

    return [name for name in installed() if name in ("jackfield", "vllm")]


def main(argv: list[str] | None = None) -> int:
    """Return the exit status, 1 if a test or a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--engines", nargs="+", help="default: jackfield and vllm, if installed")
    parser.add_argument("--output", help="file that results are added to")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], help="words of the cases to run")
    parser.add_argument("--budget-s", type=float, default=600.0, help="seconds for one engine")
    parser.add_argument("--print", action="store_true", help="the commands alone")
    args = parser.parse_args(argv)
    commands = {
        case.name: case.command(args.engines or installed(), args.output, args.budget_s)
        for case in cases(args.gpus)
        if not args.only or any(word in case.name for word in args.only)
    }
    if not args.skip_tests:
        pytest = [sys.executable, "-m", "pytest", "-q", "-n0"]
        tests = {"tests": [*pytest, "-m", "gpu", *TESTS], "kits": [*pytest, *KITS]}
        commands = {**tests, **commands}
    failed = []
    for name, command in commands.items():
        print(f"# {name}\n{shlex.join(command)}", flush=True)
        if args.print:
            continue
        began = time.monotonic()
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
        print(f"# {name}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
