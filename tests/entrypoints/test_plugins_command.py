"""`jackfield plugins`, `jackfield plugins new`, and `GET /v1/plugins`."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from serving import engine_config, running, save_random

from jackfield import hookimpl
from jackfield.core.registry import Provenance, load_plugins
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.cli.options import engine_options
from jackfield.entrypoints.cli.serve_settings import make_parser
from jackfield.entrypoints.cli.skeleton import KINDS, write_skeleton
from jackfield.entrypoints.inventory import inventory
from jackfield.entrypoints.openai.context import ServerOptions

EXPECTED = {"kind": "tool_parser", "name": "hermes", "distribution": "jackfield"}


class Broken:
    @hookimpl
    def register_tool_parsers(self, registry: object) -> None:
        registry.add("absent", "no_such_module:Parser")  # type: ignore[attr-defined]

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
    listener = rows["hook", "engine_started"]
    assert (listener.distribution, listener.version) == ("broken", "2.0")
    unchecked = {(row.kind, row.name): row for row in inventory(plugins, check=False)}
    assert unchecked.keys() == rows.keys()
    assert {row.status for row in unchecked.values()} == {"registered"}


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
    (left_out,) = (row for row in rows if row["kind"] == "plugin")
    assert (left_out["name"], left_out["status"]) == ("tools", "left out: disabled")


def test_no_plugin_joins_the_engine_option() -> None:
    argv = ["--no-plugin", "a", "--disable-plugins", "b", "c", "--no-plugin", "d"]
    options = engine_options(make_parser().parse_args(argv))
    assert options["disable_plugins"] == ("b", "c", "a", "d")
    assert "disable_plugins" not in engine_options(make_parser().parse_args([]))


@pytest.mark.parametrize(
    ("argv", "told"),
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
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        status = main(["plugins", *argv, "--into", str(tmp_path)])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert told in capsys.readouterr().err
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
    assert "jackfield_api = 1\n" in (folder / "src/jackfield_mine/__init__.py").read_text()


def test_the_route_is_there_only_when_asked_for(tmp_path: Path) -> None:
    config = engine_config(save_random(tmp_path))
    with running(config) as server:
        assert httpx.get(f"{server.url}/v1/plugins").status_code == 404
    options = ServerOptions(enable_plugins_route=True, api_keys=("key",))
    with running(config, options) as server:
        assert httpx.get(f"{server.url}/v1/plugins").status_code == 401
        answer = httpx.get(
            f"{server.url}/v1/plugins", headers={"Authorization": "Bearer key"}, timeout=300
        ).json()
    assert answer["object"] == "list"
    assert any(
        row.items() >= {**EXPECTED, "status": "works here"}.items() for row in answer["data"]
    )
