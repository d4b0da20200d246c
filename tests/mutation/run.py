"""Makes small slips in copies of the package, one at a time in each, and notes which the tests
notice."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from choice import Chooser, planned
from slips import Slip

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/benchmarks/mutants.jsonl"
SLIP_SECONDS = 90.0
"""For the tests of one slip, the likeliest first; what has not run by then does not run."""
MOST_SPARED = 3
TEST_SECONDS = 45
"""A test that takes longer has failed: the slip made it wait for ever."""


class Copy:
    """A copy of the package with an interpreter that imports it, and pytest sessions in it."""

    def __init__(self, original: Path, folder: Path) -> None:
        self.root = folder / "jackfield"
        if self.root.exists():
            shutil.rmtree(self.root)
        shutil.copytree(original, self.root)
        # Its packages are this interpreter's, but `jackfield` is found in the copy first.
        venv.create(folder / "venv", symlinks=True, with_pip=False, clear=True)
        (packages,) = (folder / "venv/lib").glob("python*/site-packages")
        paths = [str(folder), *(path for path in sys.path if path.endswith("site-packages"))]
        (packages / "copy.pth").write_text("\n".join(paths) + "\n")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "VIRTUAL_ENV": str(folder / "venv")}
        self._sessions = subprocess.Popen(
            [str(folder / "venv/bin/python"), str(self.root / "tests/mutation/session.py")],
            cwd=self.root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(self, *arguments: str, seconds: float) -> dict[str, Any]:
        """One pytest session, as `session.run`."""
        assert self._sessions.stdin is not None and self._sessions.stdout is not None
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={TEST_SECONDS}"]
        request = {"arguments": [*options, *arguments], "seconds": seconds}
        print(json.dumps(request), file=self._sessions.stdin, flush=True)
        return json.loads(self._sessions.stdout.readline())  # type: ignore[no-any-return]

    def write(self, file: str, source: bytes) -> None:
        """Each time with another time of change, or Python would read the bytecode of the last."""
        changed = (self.root / file).stat().st_mtime + 2
        (self.root / file).write_bytes(source)
        os.utime(self.root / file, (changed, changed))


def tried(copy: Copy, chooser: Chooser, slip: Slip, spared: set[str]) -> dict[str, Any] | None:
    """What the tests say of one slip; None: too many of them say nothing.

    A test counts only if it passes without the slip, and then fails with it once more: beside other
    jobs it may be late once. Others are added to `spared`, and not run.
    """
    source = (copy.root / slip.file).read_bytes()
    files = chooser.of(slip)
    for _ in range(MOST_SPARED):
        copy.write(slip.file, slip.applied(source))
        try:
            deselected = [f"--deselect={name}" for name in sorted(spared)]
            outcome = copy.run("-x", *files, *deselected, seconds=SLIP_SECONDS)
        finally:
            copy.write(slip.file, source)
        by = next(iter(outcome["failed"]), None)
        if by is None:
            break
        if copy.run(by, seconds=SLIP_SECONDS)["status"] == 0:
            if fails_again(copy, slip, source, by):
                break
            print(f"fails with a slip now and then: {by}", flush=True)
        else:
            print(f"fails without a slip, too: {by}", flush=True)
        if not outcome["collected"]:
            files.remove(by)
        spared.add(by)
    else:
        return None
    ran = [name.partition("::")[0] for name in [*outcome["passed"], *outcome["failed"]]]
    result = "survived"
    if by is not None:
        result = "killed" if outcome["collected"] else "killed at import"
    elif outcome["status"] not in (None, 0):  # The session itself broke.
        result = "killed at import"
    return {
        "tests": list(dict.fromkeys(ran)), "num_tests": len(outcome["passed"]), "result": result,
        "by": by, "seconds": outcome["seconds"],
    }  # fmt: skip


def fails_again(copy: Copy, slip: Slip, source: bytes, test: str) -> bool:
    copy.write(slip.file, slip.applied(source))
    try:
        return bool(copy.run(test, seconds=SLIP_SECONDS)["status"] != 0)
    finally:
        copy.write(slip.file, source)


def known_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each slip, by its key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["key"]: record for record in map(json.loads, lines)}


def summary(results: dict[str, dict[str, Any]], planned: int) -> str:
    counts = Counter(record["result"] for record in results.values())
    equivalent = sum("equivalent" in record for record in results.values())
    killed = counts.total() - counts["survived"]
    return (
        f"{counts.total()} slips of {planned}: {killed} killed,"
        f" {counts['killed at import']} of them at import, {counts['survived']} survived,"
        f" {equivalent} of them equivalent:"
        f" {killed / max(1, counts.total() - equivalent):.1%} of the others killed"
    )


def copy_checkout(folder: Path) -> None:
    """All files but ignored ones, where no slip is made: those are planned, and their tests chosen,
    from the code as it is."""
    if folder.exists():
        shutil.rmtree(folder)
    for name in filter(None, git("ls-files", "-z", "-co", "--exclude-standard").split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many slips of the plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="*", default=[], help="only these directories")
    parser.add_argument("--again", action="store_true", help="the survivors without a reason too")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    commit = git("rev-parse", "--short", "HEAD").strip()
    folder = Path(os.environ.get("MUTANTS_COPY", Path(tempfile.gettempdir()) / "mutants"))
    original = folder / "original"
    copy_checkout(original)
    slips = planned(original, options.seed, options.rooms)
    chooser = Chooser(original)
    results = known_results(options.results)
    spared: set[str] = set()
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for job in range(options.jobs):
        free.put(Copy(original, folder / str(job)))

    def wanted(slip: Slip) -> bool:
        known = results.get(slip.key)
        if known is None:
            return True
        return options.again and known["result"] == "survived" and "equivalent" not in known

    def outcome_of(slip: Slip) -> tuple[Slip, dict[str, Any] | None]:
        copy = free.get()
        try:
            return slip, tried(copy, chooser, slip, spared)
        finally:
            free.put(copy)

    pool = ThreadPoolExecutor(options.jobs)
    try:
        todo = filter(wanted, slips[: options.count])
        for future in as_completed([pool.submit(outcome_of, slip) for slip in todo]):
            slip, outcome = future.result()
            if outcome is None:
                continue
            record = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": commit, "key": slip.key, "file": slip.file, "line": slip.line,
                "kind": slip.kind, "before": slip.before, "after": slip.after, **outcome,
            }  # fmt: skip
            results[slip.key] = record
            with options.results.open("a") as file:
                print(json.dumps(record), file=file)
            print(f"{slip.file}:{slip.line}: {slip.kind}: {record['result']}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    print(summary(results, len(slips)))


if __name__ == "__main__":
    main()
