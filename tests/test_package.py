"""The package and the house: what ships, which way imports run, how plugins load."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from sources import imports_of

import jackfield
from jackfield import hookimpl
from jackfield.core import protocols
from jackfield.core.errors import PluginError
from jackfield.core.registry import Provenance, load_plugins

ROOT = Path(jackfield.__file__).resolve().parent
SOURCES = ("core", "plugins", "kernels", "entrypoints", "lora")


def modules() -> list[Path]:
    return [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]


def test_package_list_is_complete() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    names = {"jackfield"}
    for path in modules():
        names.add(".".join(("jackfield", *path.parent.relative_to(ROOT).parts)))
    assert listed == names


def imports(path: Path) -> set[str]:
    """Absolute names of what a module imports, within the package, and top names of the rest."""
    package = ["jackfield", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node, _ in imports_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names.add(".".join([*base, *(node.module or "").split(".")]).rstrip("."))
    return names


FORBIDDEN = {
    "core": ("jackfield.plugins", "jackfield.entrypoints", "jackfield.kernels"),
    "plugins": ("jackfield.entrypoints",),
    "kernels": ("jackfield.core", "jackfield.plugins", "jackfield.entrypoints"),
    "entrypoints": ("jackfield.plugins", "jackfield.kernels"),
    "core/scheduling": ("torch", "transformers"),
    "core/cache": ("torch", "transformers"),
}


MEASURES_KERNELS = tuple(
    f"entrypoints/bench/kernels/{name}.py"
    for name in (
        "cache_cases",
        "expert_cases",
        "index_cases",
        "kernel_cases",
        "latent_cases",
        "quant_cases",
        "state_cases",
        "token_layer",
        "tune",
        "tune_gemv",
        "tune_int4",
    )
)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_run_one_way(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        if path.relative_to(ROOT).as_posix() in MEASURES_KERNELS:
            continue
        for name in imports(path):
            wrong = [f for f in FORBIDDEN[folder] if name == f or name.startswith(f + ".")]
            assert not wrong, f"{path.relative_to(ROOT)} imports {name}"


def test_finding_plugins_imports_no_torch() -> None:
    code = (
        "import sys, jackfield.core.registry as r; r.load_plugins(); print('torch' in sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert completed.stdout.strip() == "False"


def test_schemas_work_where_no_extra_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split("[<>=;]", requirement)[0] for requirement in project["dependencies"]}
    assert "llguidance" in needed and "xgrammar" not in needed
    first = load_plugins()["structured_backend"].entries()[0]
    assert first.name == "llguidance", "auto prefers the one that everyone has"
    extra = {re.split("[<>=;]", name)[0] for name in project["optional-dependencies"]["structured"]}
    assert extra == {"llguidance", "xgrammar"}


def test_a_server_that_meets_no_grammar_imports_no_backend() -> None:
    code = (
        "import sys, jackfield, jackfield.entrypoints.server.app, jackfield.core.engine.grammars\n"
        "plugins = jackfield.core.registry.load_plugins()\n"
        "for name in plugins['structured_backend']: plugins['structured_backend'].load(name)\n"
        "print({'llguidance', 'xgrammar'} & set(sys.modules))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert completed.stdout.strip() == "set()"


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=skipped)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w",
         str(tmp_path), str(copy)],
        check=True, timeout=300,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"jackfield", next(t for t in tops if t.endswith(".dist-info"))}
    shipped = {name for name in names if name.endswith(".py")}
    assert shipped == {
        f"jackfield/{path.relative_to(ROOT)}" for path in [*modules(), *ROOT.glob("__*__.py")]
    }
    assert "jackfield/py.typed" in names
    assert "jackfield/plugins/models/embedded/model.safetensors" in names
    assert "jackfield/plugins/models/embedded/eagle3/model.safetensors" in names


# ---------------------------------------------------------------- registry


class Mine:
    @hookimpl
    def register_tool_parsers(self, registry: Any) -> None:
        registry.add("mine", "jackfield.core.protocols:ToolParser")


class Clash:
    @hookimpl
    def register_tool_parsers(self, registry: Any) -> None:
        registry.add("hermes", "jackfield.core.protocols:ToolParser")


class Override:
    @hookimpl
    def register_tool_parsers(self, registry: Any) -> None:
        registry.add("hermes", "jackfield.core.protocols:ToolParser", override=True)


def test_plugin_names_are_lazy_and_typed_by_kind() -> None:
    plugins = load_plugins(extra=[Mine()])
    assert plugins["tool_parser"].load("mine") is protocols.ToolParser
    with pytest.raises(PluginError, match=r"did you mean 'hermes'"):
        plugins["tool_parser"].load("herms")


def test_conflict_names_both_distributions() -> None:
    with pytest.raises(PluginError, match=r"hermes.*twice.*jackfield.*other"):
        load_plugins().add_plugin(Clash(), Provenance("other", "1.0", "clash"))


def test_override_is_possible_on_request() -> None:
    plugins = load_plugins(extra=[Override()])
    assert plugins["tool_parser"].load("hermes") is protocols.ToolParser


def test_clashing_plugin_is_left_out_whole() -> None:
    plugins = load_plugins()
    before = {kind: set(registry) for kind, registry in plugins.registries.items()}
    with pytest.raises(PluginError):
        plugins.add_plugin(Clash(), Provenance("other", "1.0", "clash"))
    assert {kind: set(registry) for kind, registry in plugins.registries.items()} == before


@pytest.fixture
def broken_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed distribution whose plugin does not import."""
    (tmp_path / "broken_plugin.py").write_text("import no_such_module_anywhere\n")
    info = tmp_path / "broken_dist-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-dist\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        textwrap.dedent("""\
        [jackfield]
        broken = broken_plugin
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "broken-dist"


def test_broken_plugin_is_reported_and_left_out(broken_distribution: str) -> None:
    plugins = load_plugins()
    (failed,) = plugins.failed
    assert failed.provenance == Provenance("broken-dist", "1.2", "broken")
    assert "no_such_module_anywhere" in failed.error
    assert "hermes" in plugins["tool_parser"]


def test_broken_plugin_named_explicitly_stops_the_start(broken_distribution: str) -> None:
    with pytest.raises(PluginError, match=r"broken-dist 1.2"):
        load_plugins(only=["broken"])


def test_disabled_plugin_is_not_loaded(broken_distribution: str) -> None:
    assert load_plugins(disable=["broken-dist"]).failed == []
    assert load_plugins(disable=["broken"]).failed == []
