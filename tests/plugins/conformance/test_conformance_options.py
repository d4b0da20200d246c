"""`pytest --pyargs jackfield.plugins.conformance`, as outsiders run it: in a process of its own."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import forked
import mutants
import pytest
from mutants import plugin_of

import jackfield
from jackfield.core.protocols.logits_processors import LogitsProcessor
from jackfield.core.registry import Entry, Provenance, load_plugins
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.options import KITS

PACKAGE = "jackfield.plugins.conformance"
BAD = Provenance("bad-dist", "2.0", "bad")


def run_pytest(
    *arguments: str, folder: Path, run: Any = forked.run, **environment: str
) -> tuple[int, str]:
    """→ (exit status, everything printed). run: a fork has this checkout's Jackfield imported."""
    quiet = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestDeprecationWarning"]
    completed = run(
        [sys.executable, "-m", "pytest", *quiet, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return completed.returncode, completed.stdout + completed.stderr


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
    status, printed = run_pytest(
        *arguments, folder=tmp_path, PYTHONPATH=forked.python_path(tmp_path)
    )
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "no model named 'NoSuch' is registered" in printed


@pytest.mark.parametrize("kind", KITS)
def test_a_kit_tries_what_is_not_installed_too(kind: str) -> None:
    """Given as `plugin`: each kit finds its subject as every other does."""
    kit = getattr(importlib.import_module(f"{PACKAGE}.{KITS[kind].module}"), KITS[kind].class_name)
    assert issubclass(kit, Kit) and kit.kind == kind
    subject = load_plugins()[kind].entries()
    if not subject:  # None is in the box.
        methods = dict.fromkeys(("__init__", "start", "apply"), lambda self, *_: None)
        subject = [Entry("none", type("Subject", (LogitsProcessor,), methods), BAD)]
    plugin = plugin_of(kind, "not_installed", subject[0].reference)
    kit_class = type("Made", (kit,), {"name": "not_installed", "plugin": plugin})
    assert kit_class.registered() is not None


def test_the_pytest_plugin_imports_no_torch_and_no_engine() -> None:
    program = textwrap.dedent("""\
        import sys
        import jackfield.plugins.conformance.options
        print({"torch", "transformers", "jackfield.core.engine"} & set(sys.modules))
        """)
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert completed.stdout.strip() == "set()", completed.stderr


# ---------------------------------------------------------------- as somebody else's package

BACKEND = """\
from jackfield.plugins.attention.torch import TorchAttention

class Mine(TorchAttention):
    name = "mine"

class Forgetful(TorchAttention):
    name = "forgetful"

    def forward(self, spec, *args, **more):
        out = super().forward(spec, *args, **more)
        return out * 0.5 if spec.soft_cap else out
"""
PLUGIN = """\
from jackfield import hookimpl

@hookimpl
def register_attention_backends(registry):
    registry.add("mine", "their_backend:Mine")
    registry.add("forgetful", "their_backend:Forgetful")
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with Jackfield as a wheel would install it, and a third party's
    attention backends."""
    site = tmp_path / "site"
    source = Path(jackfield.__file__).resolve().parent
    for folder in ("core", "plugins", "kernels", "entrypoints"):
        shutil.copytree(
            source / folder,
            site / "jackfield" / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(source / "__init__.py", site / "jackfield")
    files = [str(path.relative_to(site)) for path in site.rglob("*.py")]
    points: dict[str, list[str]] = {}
    for point in metadata.distribution("jackfield").entry_points:
        points.setdefault(point.group, []).append(f"{point.name} = {point.value}")
    distribution(site, "jackfield", metadata.version("jackfield"), points, files)
    (site / "their_plugin.py").write_text(PLUGIN)
    (site / "their_backend.py").write_text(BACKEND)
    distribution(site, "theirs", "1.0", {"jackfield": ["theirs = their_plugin"]}, [])
    return site


def distribution(
    site: Path, name: str, version: str, points: dict[str, list[str]], files: list[str]
) -> None:
    """What pip writes beside a package."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [line for group, own in points.items() for line in (f"[{group}]", *own)]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.mark.slow
def test_an_installed_jackfield_checks_a_third_partys_backend(
    installed: Path, tmp_path: Path
) -> None:
    path: dict[str, Any] = {"PYTHONPATH": forked.python_path(installed), "run": subprocess.run}
    arguments = ("--pyargs", PACKAGE, "--attention-backend", "mine", "-k", "features", "-v")
    status, printed = run_pytest(*arguments, folder=tmp_path, **path)
    assert status == 0, printed
    assert "site/jackfield/plugins/conformance/test_registered.py::TestAttentionBackend_mine::" in (
        printed
    )
    arguments = ("--pyargs", PACKAGE, "--attention-backend", "forgetful", "-k", "soft_cap-decode")
    status, printed = run_pytest(*arguments, folder=tmp_path, **path)
    assert status == pytest.ExitCode.TESTS_FAILED, printed
    assert "FAILED" in printed and "TestAttentionBackend_forgetful" in printed
    assert "Tensor-likes are not close" in printed


def test_all_stands_for_every_registered_name(installed: Path, tmp_path: Path) -> None:
    arguments = ("--pyargs", PACKAGE, "--attention-backend", "all", "--co", "-q", "-k", "refusals")
    status, printed = run_pytest(
        *arguments, folder=tmp_path, PYTHONPATH=forked.python_path(installed)
    )
    assert status == 0, printed
    for name in ("torch", "triton", "flashinfer", "mine", "forgetful"):
        assert f"::TestAttentionBackend_{name}::" in printed


def test_a_mutant_is_no_matter_of_the_checkouts_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkout's root is a package, which no inner session imports under its folder's name."""
    checkout = tmp_path / "a-checkout"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "__init__.py").write_text("raise ImportError('imported once more')")
    anchor = checkout / "tests" / "anchor.py"
    anchor.write_text("")
    monkeypatch.setattr(mutants, "ANCHOR", anchor)

    class Sound:
        __test__ = True

        def test_nothing(self) -> None:
            pass

    outcomes = mutants.run_kit(Sound)
    assert outcomes.by_outcome["passed"] == {"test_nothing"}, outcomes.reasons
