"""Every kernel compiles for a real GPU, too: the interpreter forgives what the compiler does not.

Triton brings its own assembler, so no GPU is needed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(("program", "count"), [("compile_all.py", 69), ("compile_states.py", 8)])
def test_every_kernel_compiles_for_a_hopper_gpu(program: str, count: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = subprocess.run(
        [sys.executable, str(PROGRAMS / program)], env=environment, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert len(completed.stdout.split()) == count
