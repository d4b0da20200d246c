"""What a mixture's layer launches at a real model's sizes fits a Hopper GPU, and its registers.

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

PROGRAM = Path(__file__).parent / "programs" / "compile_experts.py"


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "qwen3-30b-a3b",
            "gpt-oss-20b",
            "nemotron-3-nano",
            "gemma-4-26b-a4b",
            "step-3.5-flash",
        )
    ],
)
def test_experts_of_a_real_model_fit_the_registers(model: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), model],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]
    # A router's product, choosing, and a product for both; where tokens are many, lists and sums,
    # too; of 4 bits, another one for few.
    names = {line.split()[0] for line in completed.stdout.splitlines()}
    assert len(names) == 6 + ("_expert_word_gemv_kernel" in names), names
    print(completed.stdout)
