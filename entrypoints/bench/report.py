"""Output of results: environment, JSON lines, plain tables, percentiles."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import __version__

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = Path("docs/benchmarks")
Record = dict[str, Any]


def commit() -> str:
    """Return the source tree's commit, with a plus if modified. JACKFIELD_COMMIT overrides it."""
    if commit := os.environ.get("JACKFIELD_COMMIT"):
        return commit
    if (ROOT / ".git").exists():
        try:
            head = _git("rev-parse", "--short", "HEAD")
            return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
        except (OSError, subprocess.SubprocessError):
            pass
    return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def version_of(distribution: str) -> str | None:
    """Return a distribution's version without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """Return the GPU's name from its driver, without a CUDA context; else the processor's."""
    if device != "cpu":
        try:
            done = subprocess.run(
                ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                capture_output=True, text=True, check=True, timeout=20,
            )  # fmt: skip
            return done.stdout.splitlines()[0].strip()
        except (OSError, subprocess.SubprocessError, IndexError):
            if device == "cuda":
                return "cuda"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"cpu: {line.split(':', 1)[1].strip()}"
    except OSError:
        pass
    return f"cpu: {platform.machine()}"


def environment(device: str) -> Record:
    """Return date, commit, device and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "triton": version_of("triton"),
        "jackfield": __version__,
    }


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        help="append JSON lines to this file, - for standard output (default: a file of today's "
        "date in docs/benchmarks if that folder is here, else standard output)",
    )


def default_output() -> str:
    if DEFAULT_FOLDER.is_dir():
        return str(DEFAULT_FOLDER / f"{datetime.date.today().isoformat()}.jsonl")
    return "-"


class Emitter:
    """Writes each result at once, and keeps all for the table."""

    def __init__(self, output: str | None, facts: Record) -> None:
        self.output = output if output is not None else default_output()
        self.facts = facts
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        """Write and flush one line, so that nothing is lost in a kill."""
        line = {**self.facts, **record}
        if not line.get("partial"):
            self.records.append(line)
        text = json.dumps(line)
        if self.output == "-":
            print(text, flush=True)
            return
        path = Path(self.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as lines:
            lines.write(text + "\n")
            lines.flush()
            os.fsync(lines.fileno())


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a linearly interpolated percentile."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """Return plain-text columns, numbers aligned to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max(len(str(header[i])), *(len(row[i]) for row in cells)) if cells else len(header[i])
        for i in range(len(header))
    ]
    right = [
        all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))
    ]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *(line(r) for r in cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def summary(records: Sequence[Record]) -> str:
    """Return a table with one row per number."""
    rows = []
    for record in records:
        facts = ", ".join(f"{k}={v}" for k, v in record.get("at", {}).items())
        name = " ".join(
            part for part in (record.get("engine", ""), record.get("model", ""),
                              record.get("workload", ""), facts) if part
        )  # fmt: skip
        for key, value in record.get("measured", {}).items():
            if isinstance(value, int | float):
                rows.append([name, key, value])
                name = ""
    return table(rows, ["what", "number", "value"])


def say(text: str) -> None:
    """Print to standard error, as standard output is JSON."""
    print(text, file=sys.stderr, flush=True)
