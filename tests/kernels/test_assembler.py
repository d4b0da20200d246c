"""Kernels are assembled by a ptxas that assembles tensor-core products rightly."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path

import forked
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton

from jackfield.kernels import assembler
from jackfield.kernels.assembler import Assembler, shipped_assemblers, sound_assembler

PROGRAM = Path(__file__).parent / "programs" / "unwritten_in_delta.py"
OLD, NEW, NEWER = (Assembler(f"ptxas {n}", n) for n in ((12, 8), (12, 9), (13, 1)))


@pytest.mark.parametrize(
    ("shipped", "driver", "chosen"),
    [
        ([OLD, NEW], (12, 4), NEW),  # Of the driver's major version: it loads the code.
        ([OLD, NEW], (13, 0), NEW),
        ([OLD, NEWER], (13, 0), NEWER),
        ([OLD, NEWER], (12, 8), None),
        ([NEW, NEWER], (13, 0), None),
        ([OLD], (13, 0), None),
        ([], (13, 0), None),
    ],
)
def test_the_choice(
    shipped: list[Assembler], driver: tuple[int, int], chosen: Assembler | None
) -> None:
    assert sound_assembler(shipped, driver) == chosen


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests may choose."""
    monkeypatch.delenv(assembler.VARIABLE, raising=False)
    monkeypatch.setattr(triton.knobs, "propagate_env", False)
    with triton.knobs.nvidia.scope():
        yield


def test_triton_gets_it_where_there_is_a_driver(
    in_triton: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    default = triton.knobs.nvidia.ptxas.path
    newer = next((a for a in shipped_assemblers() if a.version >= assembler.SOUND), None)
    if newer is None or newer.path == default:
        pytest.skip("this Triton has one assembler")
    monkeypatch.setattr(assembler, "driver_version", lambda: None)
    assembler.choose_assembler()
    assert triton.knobs.nvidia.ptxas.path == default
    monkeypatch.setattr(assembler, "driver_version", lambda: (10, 0))
    with caplog.at_level(logging.WARNING):
        assembler.choose_assembler()
    assert triton.knobs.nvidia.ptxas.path == default
    assert "TRITON_PTXAS_PATH" in caplog.text
    monkeypatch.setattr(assembler, "driver_version", lambda: (99, 0))
    monkeypatch.setenv(assembler.VARIABLE, default)
    assembler.choose_assembler()
    assert triton.knobs.nvidia.ptxas.path == default
    monkeypatch.delenv(assembler.VARIABLE)
    assembler.choose_assembler()
    assert triton.knobs.nvidia.ptxas.path == newer.path


@pytest.mark.parametrize("of", ["ctypes.CDLL", "triton.knobs.NvidiaTool.from_path"])
def test_no_import_of_kernels_ends_because_nothing_can_be_chosen(
    of: str, in_triton: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that is no driver has no such function; a ptxas may not be run."""

    def fails(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    default = triton.knobs.nvidia.ptxas.path
    if of == "ctypes.CDLL":
        monkeypatch.setattr(of, lambda path: object())
        assert assembler.driver_version() is None
    else:
        monkeypatch.setattr(assembler, "driver_version", lambda: (99, 0))
        monkeypatch.setattr(of, fails)
        with caplog.at_level(logging.WARNING):
            assembler.choose_assembler()
        assert "Permission denied" in caplog.text and assembler.VARIABLE in caplog.text
        monkeypatch.undo()
    assembler.choose_assembler()
    assert triton.knobs.nvidia.ptxas.path == default


def test_an_old_one_reads_what_nothing_wrote_and_a_sound_one_does_not() -> None:
    """What the choice is for, and that uniform_registers.py finds it."""
    old, *others = shipped_assemblers()
    if old.version != (12, 8):
        pytest.skip("this Triton's first assembler is another")
    chosen = sound_assembler([old, *others], (99, 0))
    assert chosen is not None
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = forked.run(
        [sys.executable, str(PROGRAM), old.path, chosen.path], env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-2000:]
    of_old, of_chosen = map(int, completed.stdout.split())
    assert of_old > 0
    assert of_chosen == 0
