"""Distributions with a Jackfield plugin, as if pip had installed them."""

from __future__ import annotations

import functools
import os
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

Install = Callable[..., str]
# This file may be imported twice.
_read = getattr(metadata.entry_points, "__wrapped__", metadata.entry_points)


@functools.lru_cache(maxsize=64)
def _entry_points(
    folders: tuple[tuple[str, int], ...], finders: tuple[Any, ...], wanted: tuple[Any, ...]
) -> Any:
    return _read(**dict(wanted))


def _remembered(**wanted: Any) -> Any:
    """As importlib's own, but read again only where a folder of `sys.path` has changed: every
    engine asks, and a file of each distribution takes as long as the rest of a small start."""
    folders = tuple(
        (p, os.stat(p).st_mtime_ns) for p in map(os.path.abspath, sys.path) if os.path.exists(p)
    )
    return _entry_points(folders, tuple(sys.meta_path), tuple(sorted(wanted.items())))


def remember_entry_points() -> None:
    _remembered.__wrapped__ = _read  # type: ignore[attr-defined]
    metadata.entry_points = _remembered


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
