"""Examples, run as programs in this process: one of their own would take longer to start than to
run."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jackfield

BENCHMARKS = Path(jackfield.__file__).resolve().parent / "examples/benchmarks"


def benchmark(name: str) -> ModuleType:
    """Return a program of examples/benchmarks as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look for it there.
    spec.loader.exec_module(module)
    return module


def run_program(path: Path, *arguments: str) -> None:
    """Raises AssertionError if its status is not 0."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
