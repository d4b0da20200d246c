"""The kernels of batch-invariant steps fit a Hopper GPU at a real model's sizes.

Triton compiles for such a GPU wherever it runs; launches go nowhere, and no memory is touched.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton.runtime._async_compile") is None:
    pytest.skip("Triton cannot compile aside", allow_module_level=True)

PROGRAM = Path(__file__).parent / "programs" / "compile_invariant.py"


@pytest.mark.slow
def test_kernels_fit_the_registers(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]
    kernels = {line.split()[0] for line in completed.stdout.splitlines()}
    assert {"_uniform_matmul_kernel", "_expert_matmul_kernel", "_prefill_kernel"} <= kernels
