"""Two threads may import `transformers` at once."""

from __future__ import annotations

import importlib._bootstrap
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from jackfield.core.loading.transformers_module import transformers_module

IMPORTED = """
import sys, threading, types

begun, go = sys.modules["gates"].begun, sys.modules["gates"].go
begun.set()
assert go.wait(60)
whole = types.ModuleType("transformers")
whole.CONFIG_MAPPING = {}
sys.modules["transformers"] = whole
"""


class Gates:
    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()


def test_a_thread_that_waits_for_the_import_gets_the_whole_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates()
    (tmp_path / "transformers.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "gates", gates)  # type: ignore[misc]
    monkeypatch.delitem(sys.modules, transformers.__name__)
    found: list[Any] = []
    first, second = (
        threading.Thread(target=lambda: found.append(transformers_module())) for _ in range(2)
    )
    first.start()
    assert gates.begun.wait(60)
    second.start()
    waiting: Any = importlib._bootstrap._blocking_on  # type: ignore[attr-defined]
    while second.ident not in waiting:
        time.sleep(0.001)
    gates.go.set()
    for thread in (first, second):
        thread.join(60)
    assert len(found) == 2 and all(module.CONFIG_MAPPING == {} for module in found)
