"""Examples, run as programs in this process: one of their own would take longer to start than to
run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


def run_program(path: Path, *arguments: str) -> None:
    """Raises AssertionError if its status is not 0."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
