"""Every conformance kit on this machine's GPU; one JSON line for each class of tests, or name.

    python examples/benchmarks/conformance.py --out docs/benchmarks/conformance.jsonl
    python examples/benchmarks/conformance.py --kind attention_backend --name mine
    python examples/benchmarks/conformance.py --architectures --processes 13 --out ...

The first runs this project's own classes in tests/plugins, which have the kits' data: samples,
checkpoints, configurations; `--folder` chooses among them. The second checks registered names,
anybody's, each in a process of its own. The third compares each architecture with its reference
through the whole engine, and says how near it comes. `--seconds` bounds a folder, a name, or all
architectures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.options import KITS, PACKAGE

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "plugins"
ON_GPU = TESTS / "models" / "test_architectures_on_gpu.py"
DTYPES = ("float32", "bfloat16")
TO_REPORT = 30.0
"""Seconds for pytest to write its report after its time is over."""


def environment(commit: str) -> dict[str, Any]:
    """What it ran on."""
    import torch

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "python": sys.version.split()[0],
    }


class Outcome(NamedTuple):
    """One test."""

    group: str
    """Dotted name of its class, or of its module."""
    test: str
    result: str
    """passed, failed or skipped"""
    reason: str
    properties: dict[str, str]
    """What it recorded."""


def run_pytest(arguments: list[str], seconds: float) -> tuple[list[Outcome], str]:
    """→ outcomes, and why some are missing, where that is so."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line",
            f"--junitxml={report}", "-o", "junit_family=xunit2", *arguments,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        status = ""
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = f"not through after {seconds:.0f} s"
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=TO_REPORT)
            except subprocess.TimeoutExpired:
                process.kill()
                return [], status
        if not report.is_file():
            return [], status or output.strip()[-500:]
        return [read_case(case) for case in ElementTree.parse(report).iter("testcase")], status


def read_case(case: ElementTree.Element) -> Outcome:
    """One test of a JUnit report."""
    result, reason = "passed", ""
    for tag in ("failure", "error", "skipped"):
        element = case.find(tag)
        if element is not None:
            result = "skipped" if tag == "skipped" else "failed"
            reason = " ".join(element.get("message", "").split())[:200]
    recorded = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
    return Outcome(case.get("classname", ""), case.get("name", ""), result, reason, recorded)


def summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Counts, names of what failed, reasons of what was skipped."""
    outcomes = list(outcomes)
    counts = Counter(outcome.result for outcome in outcomes)
    failures = [f"{o.test}: {o.reason}" for o in outcomes if o.result == "failed"]
    skips = Counter(o.reason for o in outcomes if o.result == "skipped")
    return {
        **{result: counts[result] for result in ("passed", "failed", "skipped")},
        **({"failures": failures} if failures else {}),
        **({"skips": dict(skips)} if skips else {}),
    }


def from_tests(folders: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Each class in these folders of tests/plugins; a folder's loose tests under its module."""
    for folder in folders:
        start = time.monotonic()
        arguments = [str(TESTS / folder), "--rootdir", str(ROOT), "-m", "gpu or not slow"]
        outcomes, status = run_pytest(arguments, seconds)
        duration = round(time.monotonic() - start, 1)
        if status:
            yield {"kind": folder, "name": "all", "failed": 1, "ended": status}
        groups: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            groups.setdefault(outcome.group.rpartition(".")[2], []).append(outcome)
        for name, members in groups.items():
            yield {"kind": folder, "name": name, **summary(members), "folder_seconds": duration}


def from_architectures(processes: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Each case: the largest difference of log-probabilities from the reference's, the bound, and
    the share of tokens beyond it (of mixtures), by the type of the weights."""
    start = time.monotonic()
    arguments = [
        str(ON_GPU), "--rootdir", str(ROOT), "-m", "gpu", "-o", "timeout=120", "-n",
        str(processes), "--dist", "worksteal",
    ]  # fmt: skip
    outcomes, status = run_pytest(arguments, seconds)
    duration = round(time.monotonic() - start, 1)
    if status:
        yield {"kind": "architectures", "name": "all", "failed": 1, "ended": status}
    cases: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        cases.setdefault(outcome.test.partition("[")[2].removesuffix("]"), []).append(outcome)
    for case, members in sorted(cases.items()):
        file, _, name = case.partition("/")
        row = {"kind": "architectures", "name": name, "file": file, **summary(members)}
        for dtype in DTYPES:
            for text in filter(None, (member.properties.get(dtype) for member in members)):
                numbers = map(float, text.split())
                row[dtype] = dict(zip(("difference", "bound", "beyond"), numbers, strict=True))
        yield {**row, "folder_seconds": duration}


def from_names(kinds: list[str], names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Each registered name of these kinds, or those of `names`."""
    plugins = load_plugins()
    for kind in kinds:
        for name in names or sorted(plugins[kind]):
            start = time.monotonic()
            arguments = ["--pyargs", PACKAGE, KITS[kind].option, name]
            outcomes, status = run_pytest(arguments, seconds)
            duration = round(time.monotonic() - start, 1)
            more = {"failed": 1, "ended": status} if status else {}
            yield {"kind": kind, "name": name, **summary(outcomes), **more, "seconds": duration}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--folder", action="append", help="of tests/plugins; default: all")
    parser.add_argument("--kind", action="append", choices=sorted(KITS), help="registered names")
    parser.add_argument("--name", action="append", default=[], help="default: all of the kind")
    parser.add_argument("--architectures", action="store_true", help="each of them, on a GPU")
    parser.add_argument("--processes", type=int, default=8, help="of --architectures")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for one process")
    parser.add_argument("--commit", default="", help="what to record as the commit")
    options = parser.parse_args()
    folders = options.folder or sorted({test.parent.name for test in TESTS.glob("*/test_*.py")})
    about = environment(options.commit)
    print(json.dumps(about))
    if options.architectures:
        rows = from_architectures(options.processes, options.seconds)
    elif options.kind:
        rows = from_names(options.kind, options.name, options.seconds)
    else:
        rows = from_tests(folders, options.seconds)
    failed = 0
    for row in rows:
        failed += row["failed"]
        counts = " ".join(f"{row.get(k, 0):>5} {k}" for k in ("passed", "failed", "skipped"))
        near = " ".join(
            f"{row[k]['difference']:.2g}/{row[k]['bound']:.2g}" for k in DTYPES if k in row
        )
        print(
            f"{row['kind']:18} {row['name']:32} {counts}  {near}{row.get('ended', '')}", flush=True
        )
        for line in [*row.get("failures", []), *row.get("skips", {})]:
            print(f"    {line[:160]}")
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps({**about, **row}) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
