"""`pytest --pyargs jackfield.plugins.conformance`, as outsiders run it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE = "jackfield.plugins.conformance"


def run_pytest(*arguments: str, folder: Path, **environment: str) -> tuple[int, str]:
    """→ (exit status, everything printed)"""
    quiet = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestDeprecationWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *quiet, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_nothing_chosen_says_how_to_choose(tmp_path: Path) -> None:
    status, printed = run_pytest("--pyargs", PACKAGE, folder=tmp_path)
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "choose what to check with --model NAME, --attention-backend NAME" in printed


def test_unknown_name_is_a_usage_error_that_lists_the_names(tmp_path: Path) -> None:
    status, printed = run_pytest("--pyargs", PACKAGE, "--tool-parser", "herms", folder=tmp_path)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "--tool-parser: no tool parser named 'herms' is registered (there are: " in printed
    assert "hermes" in printed


def test_other_projects_may_have_options_of_these_names(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--model')\n"
    )
    (tmp_path / "test_it.py").write_text(
        "def test_it(request):\n    assert request.config.getoption('--model') == 'theirs'\n"
    )
    status, printed = run_pytest("--model", "theirs", folder=tmp_path)
    assert status == 0, printed


def test_an_option_that_another_pytest_plugin_has_gets_a_prefix(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--model')\n"
    )
    arguments = ("-p", "theirs", "--pyargs", PACKAGE, "--jackfield-model", "NoSuch")
    status, printed = run_pytest(*arguments, folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "no model named 'NoSuch' is registered" in printed


def test_the_pytest_plugin_imports_no_torch_and_no_engine() -> None:
    program = textwrap.dedent("""\
        import sys
        import jackfield.plugins.conformance.options
        print({"torch", "transformers", "jackfield.core.engine"} & set(sys.modules))
        """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
