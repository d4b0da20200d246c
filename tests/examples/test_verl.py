"""verl rolls out with an engine of Jackfield's: `examples/frameworks/verl_jackfield.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jackfield

ROOT = Path(jackfield.__file__).resolve().parent
PROGRAM = Path(__file__).parent / "verl_rollouts.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_rollouts_follow_the_trainer() -> None:
    """Both sides' log-probabilities are the same after each update, and after one that failed."""
    path = os.pathsep.join([str(ROOT / "examples/frameworks"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(ROOT / "plugins/models/embedded")],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen["differences"]) == 3 and max(seen["differences"]) < 1e-4
    assert seen["step"] == 2
    assert seen["cut"] == "aborted" and seen["waiting"] == "completed"
    assert seen["rejected"] == "aborted"
    assert "the old weights serve on: missing tensors" in seen["half"]
