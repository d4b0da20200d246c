"""The outside package with a speculator that has weights: its kit, and its own test.

That it is installed and served with is nightly (test_outside_packages.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from outside import ROOT

PACKAGE = ROOT / "examples/plugins/jackfield-chained-head"


@pytest.fixture(scope="module")
def module() -> Any:
    """The package's tests, with the plugin as if it was installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGE / "src")
        patch.syspath_prepend(PACKAGE / "tests")
        spec = importlib.util.spec_from_file_location("test_head", PACKAGE / "tests/test_head.py")
        assert spec is not None and spec.loader is not None
        tests = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tests)
        plugin = importlib.import_module("jackfield_chained_head")
        tests.Following.plugin = tests.TestConformance.plugin = plugin
        yield tests
        del sys.modules["heads"]


def test_each_draft_goes_on_from_the_one_before(module: Any, tmp_path: Path) -> None:
    module.test_each_draft_goes_on_from_the_one_before(tmp_path)


def test_it_passes_the_kit(module: Any) -> None:
    kit = module.TestConformance()
    kit.test_drafts_are_tokens_of_the_vocabulary(3)
    kit.test_tokens_are_read_and_not_changed()
    kit.test_drafts_depend_on_the_tokens_of_their_row_alone()
    kit.test_an_engine_serves_the_same_tokens_with_it()
