"""Every kernel compiles for a real GPU, too: the interpreter forgives what the compiler does not.

Triton brings its own assembler, so no GPU is needed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import forked
import pytest

import jackfield.kernels

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

PROGRAMS = Path(__file__).parent / "programs"


APART = ("compile_experts", "compile_invariant")
"""Those with a test of their own."""
PROGRAM_FILES = [file for file in sorted(PROGRAMS.glob("compile_*.py")) if file.stem not in APART]
BY_DAY = ("compile_sums",)
"""The others take minutes together."""


def _programs() -> list[Any]:
    return [
        pytest.param(file, id=file.stem, marks=[pytest.mark.slow] * (file.stem not in BY_DAY))
        for file in PROGRAM_FILES
    ]


@pytest.mark.parametrize("cases", [("once",), pytest.param((), marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", _programs())
def test_every_kernel_compiles_for_a_hopper_gpu(program: Path, cases: tuple[str, ...]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = forked.run(
        [sys.executable, str(program), *cases], env=environment, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.split()


def test_no_kernel_is_left_out() -> None:
    kernels = Path(jackfield.kernels.__file__).parent
    names = {
        name
        for file in kernels.rglob("*.py")
        for name in re.findall(r"@(?:triton|gluon)\.jit[^\n]*\ndef (\w*kernel)\(", file.read_text())
    }
    programs = "".join(program.read_text() for program in PROGRAM_FILES)
    elsewhere = {"_smallest_kernel", "_uniform_matmul_kernel"}  # test_invariant_compile.py
    assert names and not [name for name in names - elsewhere if name not in programs]
