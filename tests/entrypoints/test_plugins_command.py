"""`jackfield plugins`, `jackfield plugins new`, and `GET /v1/plugins`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import httpx
import pytest
from installing import Install
from mutants import run_kit
from serving import engine_config, running, save_random

from jackfield import hookimpl
from jackfield.core.registry import Provenance, load_plugins
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.cli.skeleton import KINDS, write_skeleton
from jackfield.entrypoints.flags.engine_flags import engine_options
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.inventory import inventory
from jackfield.entrypoints.server.serve_settings import make_parser

EXPECTED = {"kind": "tool_parser", "name": "hermes", "distribution": "jackfield"}


class Broken:
    @hookimpl
    def register_tool_parsers(self, registry: object) -> None:
        registry.add("absent", "no_such_module:Parser")  # type: ignore[attr-defined]
        registry.add("nothing", None)  # type: ignore[attr-defined]
        registry.add("empty", "collections:deque")  # type: ignore[attr-defined]

    @hookimpl
    def register_attention_backends(self, registry: object) -> None:
        registry.add("no_backend", "collections:deque")  # type: ignore[attr-defined]

    @hookimpl
    async def engine_started(self, engine: object) -> None:
        pass


def test_each_name_says_whether_it_works_here_or_why_not() -> None:
    plugins = load_plugins()
    plugins.add_plugin(Broken(), Provenance("broken", "2.0", "point"))
    rows = {(row.kind, row.name): row for row in inventory(plugins)}
    assert rows["tool_parser", "hermes"].status == "works here"
    assert "No module named 'no_such_module'" in rows["tool_parser", "absent"].status
    assert "does not subclass" in rows["attention_backend", "no_backend"].status
    assert "it is None" in rows["tool_parser", "nothing"].status
    assert "it has no feed, finish" in rows["tool_parser", "empty"].status
    assert "imported in " in rows["plugin", "point"].status
    listener = rows["hook", "engine_started"]
    assert (listener.distribution, listener.version) == ("broken", "2.0")
    unchecked = {(row.kind, row.name): row for row in inventory(plugins, check=False)}
    assert unchecked.keys() == rows.keys()
    named = [row for row in unchecked.values() if row.kind != "plugin"]
    assert {row.status for row in named} == {"registered"}


def test_the_list_is_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--no-check"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["kind", "name", "distribution", "version", "status"]
    assert main(["plugins", "--json", "--no-check"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [line.split()[1] for line in lines]
    assert any(row.items() >= EXPECTED.items() for row in rows)


def test_no_plugin_leaves_one_out_and_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json", "--no-check", "--no-plugin", "tools"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert not any(row.items() >= EXPECTED.items() for row in rows)
    plugins = {row["name"]: row["status"] for row in rows if row["kind"] == "plugin"}
    assert plugins["tools"] == "left out: disabled"
    assert plugins["models"].startswith("imported in ")


def test_no_plugin_joins_the_engine_option() -> None:
    argv = ["--no-plugin", "a", "--disable-plugins", "b", "c", "--no-plugin", "d"]
    options = engine_options(make_parser().parse_args(argv))
    assert options["disable_plugins"] == ("b", "c", "a", "d")
    assert "disable_plugins" not in engine_options(make_parser().parse_args([]))


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (["new"], "give a KIND and a NAME"),
        (["new", "tool-parser"], "give a KIND and a NAME"),
        (["new", "tol-parser", "mine"], "did you mean tool-parser?"),
        (["new", "tool-parser", "../mine"], "NAME: '../mine' is no name"),
        (["new", "tool-parser", "1st"], "is no name"),
        (["new", "model", "my-model"], "NAME: 'my-model' is no architecture"),
        (["new", "model", "class"], "is no architecture"),
        (["new", "tool-parser", "hermes"], "NAME: 'hermes' is a tool parser of jackfield already"),
        (["new", "command", "serve"], "NAME: 'serve' is a command of jackfield already"),
        (["list", "tool-parser"], "unrecognized argument: tool-parser"),
    ],
)
def test_wrong_usage_is_refused_with_a_reason(
    argv: list[str], output: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        status = main(["plugins", *argv, "--into", str(tmp_path)])
    except SystemExit as raised:
        status = int(raised.code or 0)
    assert status == 2
    assert output in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_skeleton_is_never_written_over_what_is_there(tmp_path: Path) -> None:
    folder = write_skeleton("tool-parser", "my_own", tmp_path)
    assert folder == tmp_path / "jackfield-my-own"
    (folder / "README.md").write_text("mine")
    assert main(["plugins", "new", "command", "my-own", "--into", str(tmp_path)]) == 2
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_templates(kind: str, tmp_path: Path) -> None:
    folder = write_skeleton(kind, "Mine", tmp_path)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    module = kind.replace("-", "_")
    assert files == {
        "README.md",
        "pyproject.toml",
        "src/jackfield_mine/__init__.py",
        f"src/jackfield_mine/{module}.py",
        f"tests/test_{module}.py",
    }
    for path in folder.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
    assert "jackfield_api = 3\n" in (folder / "src/jackfield_mine/__init__.py").read_text()


def test_every_registered_kind_that_has_a_kit_has_a_skeleton() -> None:
    from jackfield.plugins.conformance.options import KITS

    kinds = {kind.replace("_", "-") for kind in KITS}
    written_from_a_files_format = {"checkpoint-format", "adapter-format"}
    written_from_its_family = {"media-model"}
    assert kinds - KINDS.keys() == written_from_a_files_format | written_from_its_family


@pytest.mark.parametrize(
    "kind",
    [
        "kv-compressor", "speculator", "draft-head", "collectives", "all2all-backend",
        "latent-attention-backend", "structured-backend", "logits-processor", "schedule-policy",
        "adapter-resolver",
    ],
)  # fmt: skip
def test_a_skeleton_passes_its_kit_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported, not installed: that all kinds are installed and tested is nightly. The shortest
    of each kit's tests."""
    name = f"mine{kind.replace('-', '')}"
    folder = write_skeleton(kind, name, tmp_path)
    monkeypatch.syspath_prepend(str(folder / "src"))
    plugin = importlib.import_module(f"jackfield_{name}")
    path = folder / "tests" / f"test_{kind.replace('-', '_')}.py"
    spec = importlib.util.spec_from_file_location(f"test_of_{name}", path)
    assert spec is not None and spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    subject = type("TestSkeleton", (tests.TestConformance,), {"plugin": plugin, "seconds": 30.0})
    functions = [n for n in dir(subject) if n.startswith("test_") and not LONG.search(n)]
    outcomes = run_kit(subject, functions)
    assert outcomes.by_outcome["passed"] and not outcomes.by_outcome["failed"], outcomes.reasons


LONG = re.compile("engine|sandbox|nobody_leads|environment|heavy|costs|arrives|sums|any_shape")
"""Tests of kits that take longest."""


def test_the_route_exists_only_on_request(tmp_path: Path) -> None:
    config = engine_config(save_random(tmp_path))
    with running(config) as server:
        assert httpx.get(f"{server.url}/v1/plugins").status_code == 404
    options = ServerOptions(enable_plugins_route=True, api_keys=("key",))
    # The process that checks them imports what is left, which can take ten seconds.
    left_out = ("adapters", "grammar_backends", "kv_connectors", "media", "quantization", "ray")
    config = engine_config(tmp_path, disable_plugins=left_out)
    with forked.processes_of(asyncio.unix_events), running(config, options) as server:
        assert httpx.get(f"{server.url}/v1/plugins").status_code == 401
        imported = set(sys.modules)
        response = httpx.get(
            f"{server.url}/v1/plugins", headers={"Authorization": "Bearer key"}, timeout=300
        ).json()
        assert {
            name for name in set(sys.modules) - imported if "jackfield.plugins" in name
        } == set()
    assert response["object"] == "list"
    assert any(
        row.items() >= {**EXPECTED, "status": "works here"}.items() for row in response["data"]
    )
    plugins = {row["name"]: row["status"] for row in response["data"] if row["kind"] == "plugin"}
    assert {name for name, status in plugins.items() if status == "left out: disabled"} == set(
        left_out
    )


# ---------------------------------------------------------------- installed plugins

NOISY = """
print("noise of the entry point")
@hookimpl
def register_tool_parsers(registry):
    registry.add("noisy", "noisy_plugin:Parser")
@hookimpl
def register_options(registry):
    registry.add("noisy", "noisy_plugin:Options")
def register_models(registry):
    pass

import os
from typing import Annotated
import msgspec

class Options(msgspec.Struct):
    depth: Annotated[int, msgspec.Meta(ge=1, description="How deep it looks.")] = 3

class Parser:
    os.write(1, b"noise of a class\\n")
    def feed(self, text, token_ids=()): return []
    def finish(self): return []
"""


def jackfield(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with the distributions of `folder` installed."""
    return forked.run(
        [sys.executable, "-m", "jackfield", *argv],
        capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": forked.python_path(folder)},
    )  # fmt: skip


@pytest.mark.slow
def test_what_a_plugin_prints_does_not_break_json(install: Install, tmp_path: Path) -> None:
    install("noisy", NOISY)
    completed = jackfield(tmp_path, "plugins", "--json")
    rows = {(row["kind"], row["name"]): row for row in json.loads(completed.stdout)}
    assert rows["tool_parser", "noisy"]["status"] == "works here"
    assert "warning: register_models has no @hookimpl" in rows["plugin", "noisy-point"]["status"]
    assert "noise of the entry point" in completed.stderr
    assert "noise of a class" in completed.stderr


def test_one_plugin_is_shown_with_its_options(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("noisy", NOISY)
    assert main(["plugins", "noisy"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["noisy-point", "of", "noisy", "1.0"]
    assert ["depth", "int", "≥", "1", "3", "How", "deep", "it", "looks."] in lines
    assert not any("hermes" in line for line in lines)
    assert main(["plugins", "nosy"]) == 2
    assert "no plugin 'nosy' here; did you mean 'noisy'?" in capsys.readouterr().err


COMMANDS = """
from jackfield.core.errors import ConfigError
@hookimpl
def register_commands(commands):
    commands.add("greet", "polite_plugin:greet", help="Say hello to somebody")
    commands.add("refuse", "polite_plugin:refuse")
    commands.add("crash", "polite_plugin:crash")
    commands.add("odd", "polite_plugin:odd")
def greet(argv):
    print("hello", *argv)
def refuse(argv):
    raise ConfigError("--name: must be given", param="name")
def crash(argv):
    raise RuntimeError("bang")
def odd(argv):
    return "done"
"""


def test_commands_of_plugins_are_shown_with_their_help(install: Install, tmp_path: Path) -> None:
    install("polite", COMMANDS)
    completed = jackfield(tmp_path, "--help")
    assert "  greet      Say hello to somebody (polite)" in completed.stdout.splitlines()
    assert jackfield(tmp_path, "greet", "you").stdout == "hello you\n"
    assert "did you mean 'greet'?" in jackfield(tmp_path, "gret").stderr


def test_a_plugins_configuration_error_is_printed_as_ours(install: Install, tmp_path: Path) -> None:
    install("polite", COMMANDS)
    completed = jackfield(tmp_path, "refuse")
    assert completed.returncode == 2
    assert completed.stderr == "jackfield: configuration error: --name: must be given\n"


@pytest.mark.parametrize(
    ("command", "message"), [("crash", "RuntimeError: bang"), ("odd", "TypeError: it returned str")]
)
def test_a_command_that_fails_is_named(
    install: Install, tmp_path: Path, command: str, message: str
) -> None:
    install("polite", COMMANDS)
    completed = jackfield(tmp_path, command)
    assert completed.returncode == 1
    last = completed.stderr.splitlines()[-1]
    assert last.startswith(f"jackfield: command '{command}' of polite 1.0 failed in its function: ")
    assert message in last


@pytest.mark.parametrize("override", ["", ", override=True"])
def test_a_command_cannot_take_the_name_of_ours(
    install: Install, tmp_path: Path, override: str
) -> None:
    code = f"commands.add('serve', 'greedy_plugin:x'{override})"
    install("greedy", f"@hookimpl\ndef register_commands(commands): {code}\n")
    completed = jackfield(tmp_path, "plugins", "--json", "--no-check")
    rows = {(row["kind"], row["name"]): row for row in json.loads(completed.stdout)}
    assert rows["command", "serve"]["distribution"] == "jackfield"
    assert rows["plugin", "greedy-point"]["status"] == (
        "left out: command 'serve' is jackfield's own, and cannot be replaced: give yours another "
        "name"
    )
