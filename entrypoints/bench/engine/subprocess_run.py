"""Runs one engine in a new process: `jackfield bench run` as a child, and its records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..report import Record, say

COMMAND = ("jackfield", "bench", "run")
"""A module, and the words before its options."""


def run_process(
    arguments: Sequence[str],
    *,
    command: Sequence[str] = COMMAND,
    environment: Mapping[str, str] | None = None,
    timeout: float | None,
) -> tuple[list[Record], int]:
    """Return the child's records and exit status (-1: timeout).

    The start-up clock begins before the process is created.
    """
    with tempfile.TemporaryDirectory(prefix="jackfield-bench-") as folder:
        output = Path(folder) / "records.jsonl"
        words = [sys.executable, "-m", *command, *arguments]
        words += ["--output", str(output), "--began", repr(time.time())]
        try:
            done = subprocess.run(
                words,
                env={**os.environ, **(environment or {})},
                timeout=timeout,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            status = done.returncode
            if status:
                say(done.stderr[-2000:])
        except subprocess.TimeoutExpired:
            status = -1
        lines = output.read_text().splitlines() if output.exists() else []
        return [json.loads(line) for line in lines], status
