"""Distributions with a Jackfield plugin, as if pip had installed them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(name, code): an installed distribution `name`, whose plugin module has this code."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_package(name: str, code: str, version: str = "1.0") -> str:
        (tmp_path / f"{name}_plugin.py").write_text(
            "from jackfield import hookimpl\n" + textwrap.dedent(code)
        )
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[jackfield]\n{name}-point = {name}_plugin\n")
        monkeypatch.delitem(sys.modules, f"{name}_plugin", raising=False)
        return name

    return write_package
