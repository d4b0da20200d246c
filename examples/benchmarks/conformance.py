"""Every conformance kit over everything registered, on this machine's GPU; one JSON line a name.

    python examples/benchmarks/conformance.py --out docs/benchmarks/conformance.jsonl

Each name runs in a process of its own. `--kind` and `--name` choose; `--seconds` bounds one name.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.options import KITS, PACKAGE


def environment(commit: str) -> dict[str, Any]:
    """What it ran on."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def run_kit(option: str, name: str, seconds: float) -> dict[str, Any]:
    """One name's tests: → counts, reasons of what was skipped, names of what failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line",
            f"--junitxml={report}", "--pyargs", PACKAGE, option, name,
        ]  # fmt: skip
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=folder, env=dict(os.environ), capture_output=True, text=True,
                timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"passed": 0, "failed": 0, "skipped": 0, "ended": f"after {seconds} s"}
        taken = round(time.monotonic() - began, 1)
        if not report.is_file():
            return {"passed": 0, "failed": 0, "skipped": 0, "ended": done.stderr.strip()[-500:]}
        return {**read_report(report), "seconds": taken}


def read_report(report: Path) -> dict[str, Any]:
    """A JUnit report's counts."""
    passed, failed, reasons = 0, [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            reasons[skipped.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        else:
            passed += 1
    return {
        "passed": passed,
        "failed": len(failed),
        "skipped": reasons.total(),
        **({"failures": failed} if failed else {}),
        **({"skips": dict(reasons)} if reasons else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--kind", action="append", choices=sorted(KITS), help="default: all")
    parser.add_argument("--name", action="append", help="default: every registered name")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for one name")
    parser.add_argument("--commit", default="", help="what to record as the commit")
    options = parser.parse_args()
    plugins = load_plugins()
    about = environment(options.commit)
    print(json.dumps(about))
    failed = 0
    for kind in options.kind or sorted(KITS):
        kit = KITS[kind]
        if importlib.util.find_spec(f"{PACKAGE}.{kit.module}") is None:
            continue
        for name in sorted(options.name or plugins[kind]):
            if name not in plugins[kind]:
                continue
            result = run_kit(kit.option, name, options.seconds)
            failed += result["failed"] + ("ended" in result)
            counts = " ".join(f"{result[k]:>5} {k}" for k in ("passed", "failed", "skipped"))
            print(f"{kind:18} {name:24} {counts}  {result.get('seconds', result.get('ended'))}")
            for line in [*result.get("failures", []), *result.get("skips", {})]:
                print(f"    {re.sub(chr(10), ' ', line)[:160]}")
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps({**about, "kind": kind, "name": name, **result}) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
