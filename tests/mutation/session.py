"""Runs pytest sessions that import torch and other libraries once: each is a fork of this process.

Reads a line of JSON per session, `{"arguments": …, "seconds": …}`, and writes one with what came
of it. The package itself is imported by the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import IO, Any

import pytest

PRELOADED = (
    "aiohttp.web", "httpx", "hypothesis", "msgspec", "numpy", "openai", "pytest_asyncio",
    "pytest_timeout", "safetensors.torch", "tokenizers", "torch", "transformers", "triton",
    "triton.language", "uvloop",
)  # fmt: skip


class Report:
    """The pytest plugin that writes a line of JSON for each event."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def _write(self, **event: Any) -> None:
        print(json.dumps(event), file=self._file, flush=True)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(failed=report.nodeid, collected=False)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(failed=report.nodeid, collected=True)
        elif report.when == "call" and report.passed:
            self._write(passed=report.nodeid)


def run(arguments: list[str], seconds: float) -> dict[str, Any]:
    """One session. `status` None: it did not end in time."""
    began = time.monotonic()
    with tempfile.TemporaryFile("r+") as file:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(nothing, standard)
            status = 70
            with contextlib.suppress(BaseException):
                status = int(pytest.main(arguments, plugins=[Report(file)]))
            os._exit(status)
        status, ended = None, 0
        try:
            while not ended and time.monotonic() - began < seconds:
                time.sleep(0.05)
                ended, code = os.waitpid(child, os.WNOHANG)
                if ended:
                    status = os.waitstatus_to_exitcode(code)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)  # With whatever a test started and did not end.
            if not ended:
                os.waitpid(child, 0)
        file.seek(0)
        events = [json.loads(line) for line in file if line.endswith("\n")]
    return {
        "status": status,
        "passed": [event["passed"] for event in events if "passed" in event],
        "failed": [event["failed"] for event in events if "failed" in event],
        "collected": all(event.get("collected", True) for event in events),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
