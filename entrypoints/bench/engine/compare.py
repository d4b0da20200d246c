"""`jackfield bench compare`: the same workloads on every engine, one after another.

Each engine runs in a process of its own on the same device; compare ratios within one such run
only.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence

from ...flags.parser import Parser
from ..report import Emitter, Record, add_output_options, say, table
from ..workloads import WORKLOADS
from .session import ENGINES
from .subprocess_run import run_process


def run(argv: list[str]) -> int:
    """Return the exit status, 1 if an engine failed."""
    parser = Parser(
        prog="jackfield bench compare",
        description="Run workloads through each engine that is installed, and print the ratios.",
        epilog="Other options go to `jackfield bench run` as they are (--model, --scale, …).",
    )
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, help="default: those that are installed"
    )
    parser.add_argument("--budget-s", type=float, default=900.0, help="seconds for one engine")
    add_output_options(parser)
    args, rest = parser.parse_known_args(argv)
    emitter = Emitter(args.output, {})
    status = 0
    ceilings = "measure"
    for engine in args.engines or installed():
        arguments = [*args.workloads, "--engine", engine, "--ceilings", ceilings, *rest]
        records, exit_status = run_process(arguments, timeout=args.budget_s)
        for record in records:
            emitter.emit(record)
            if "ceilings" in record:
                ceilings = json.dumps(record["ceilings"])
        if exit_status:
            say(f"{engine}: {'out of time' if exit_status < 0 else f'exit status {exit_status}'}")
            status = 1
    print(ratios(emitter.records))
    return status


def installed() -> list[str]:
    """Return the engines that can be imported here."""
    return [name for name in ENGINES if importlib.util.find_spec(name) is not None]


def ratios(records: Sequence[Record]) -> str:
    """Return a table: each workload's headline number by engine, and Jackfield's ratio to each
    peer."""
    engines = list(dict.fromkeys(record["engine"] for record in records))
    headlines: dict[tuple[str, str, str], dict[str, float]] = {}
    for record in records:
        workload = WORKLOADS.get(record["workload"])
        headline = "first_token_s" if workload is None else workload.headline
        if headline in record.get("measured", {}):
            at = ", ".join(f"{k}={v}" for k, v in record.get("at", {}).items())
            row = headlines.setdefault((record["workload"], at, headline), {})
            row[record["engine"]] = record["measured"][headline]
    peers = [engine for engine in engines if engine != "jackfield"]
    rows = []
    for (name, at, headline), numbers in headlines.items():
        own = numbers.get("jackfield")
        shares = [
            own / numbers[peer] if own is not None and peer in numbers else None for peer in peers
        ]
        label = f"{name} {at}".strip()
        rows.append([label, headline, *(numbers.get(engine) for engine in engines), *shares])
    return table(rows, ["what", "number", *engines, *(f"ours/{peer}" for peer in peers)])
