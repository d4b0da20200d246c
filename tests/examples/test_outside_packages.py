"""Packages outside the tree: built, installed beside Jackfield, run through the kits, served with,
and taken out again.

A folder of examples/plugins is found by itself. What its plugin needs to be served with, beyond its
name, it says in `tests/serve_with.py`: a context manager `flags()` of more flags.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from outside import ROOT, Outside, ask, names_of

from jackfield import LLM, SamplingParams
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.cli.skeleton import KINDS

from helpers import COMMON

PACKAGES = sorted(path.parent for path in (ROOT / "examples/plugins").glob("*/pyproject.toml"))
FLAGS = {
    "attention_backend": "--attention-backend",
    "quantization": "--quantization",
    "reasoning_parser": "--reasoning-parser",
    "schedule_policy": "--scheduling-policy",
    "tool_parser": "--tool-call-parser",
}
EXACT = ("attention_backend", "kv_connector", "schedule_policy", "speculator")
"""Kinds that change nothing about what a model says."""
PROMPT = {"prompt": "What is Jackfield?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CHAT = {
    "messages": [{"role": "user", "content": "What is the weather in Lisbon?"}],
    "tools": [WEATHER],
    "temperature": 0,
    "max_tokens": 40,
}
"""The embedded model answers with a call in Hermes' dialect."""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    return Outside(tmp_path_factory.mktemp("outside"))


@pytest.fixture(scope="module")
def plain_text() -> str:
    """What the embedded model says to PROMPT, without any plugin."""
    with LLM(device="cpu") as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return str(llm.generate(str(PROMPT["prompt"]), params, use_tqdm=False)[0].outputs[0].text)


def test_the_packages_are_found() -> None:
    assert len(PACKAGES) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES, ids=[path.name for path in PACKAGES])
def test_an_outside_package_comes_serves_and_goes(
    package: Path, outside: Outside, plain_text: str, tmp_path: Path
) -> None:
    about = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert about["entry-points"].keys() == {"jackfield"}
    for needed in about["dependencies"]:
        name = re.split(r"[^\w.-]", needed)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
    assert (package / "README.md").read_text().startswith(f"# {about['name']}\n")
    before = outside.plugins()
    assert not names_of(before, about["name"])

    source = copied(package, tmp_path)
    outside.install(outside.wheel(source))
    shutil.rmtree(source / "src")
    names = names_of(outside.plugins(), about["name"])
    assert names and "plugin" not in names, "left out, or nothing registered"
    output = outside.run("pytest", "-p", "no:cacheprovider", cwd=source)
    assert " passed" in output, output
    serve_and_compare(package, outside, about["name"], names, plain_text, tmp_path)

    outside.uninstall(about["name"])
    assert outside.plugins() == before


def copied(package: Path, folder: Path) -> Path:
    """→ a copy of a package's folder, without what a build left there"""
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info")
    return Path(shutil.copytree(package, folder / package.name, ignore=ignored))


def serve_and_compare(
    package: Path,
    outside: Outside,
    distribution: str,
    names: dict[str, str],
    plain_text: str,
    folder: Path,
) -> None:
    """Serve with everything that the package registers, and see that it is what answers."""
    flags = ["--enable-plugins-route"]
    if "model" in names:
        flags = [str(random_checkpoint(names["model"], folder)), "--load-format", "dummy", *flags]
    for kind, flag in FLAGS.items():
        if kind in names:
            flags += [flag, names[kind]]
    with needs(package) as more, outside.serving(*flags, *more) as url:
        rows = [
            row
            for row in ask(f"{url}/v1/plugins")["data"]
            if row["distribution"] == distribution and row["kind"] != "plugin"
        ]
        assert {row["status"] for row in rows} == {"works here"}, rows
        text = ask(f"{url}/v1/completions", PROMPT)["choices"][0]["text"]
        if "model" in names:
            served = ask(f"{url}/v1/models")["data"][0]["root"]
            assert served == flags[0]
        elif any(kind in names for kind in EXACT):
            assert text == plain_text
        if "tool_parser" in names:
            check_calls_are_text(url)


def check_calls_are_text(url: str) -> None:
    """A parser of another dialect takes a call of the embedded model's for text."""
    message = ask(f"{url}/v1/chat/completions", CHAT)["choices"][0]["message"]
    assert '"get_weather"' in message["content"]
    assert not message.get("tool_calls")


@contextlib.contextmanager
def needs(package: Path) -> Any:
    """→ the flags of the package's `tests/serve_with.py`, while what they need is running."""
    path = package / "tests/serve_with.py"
    if not path.is_file():
        yield []
        return
    spec = importlib.util.spec_from_file_location("serve_with", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.flags() as flags:
        yield flags


def random_checkpoint(architecture: str, folder: Path) -> Path:
    """A tiny configuration of an architecture that `transformers` has, with a tokenizer."""
    family = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**{**COMMON, "vocab_size": 2048})
    shutil.copytree(EMBEDDED_MODEL, folder, ignore=shutil.ignore_patterns("*.py", "*.safetensors"),
                    dirs_exist_ok=True)  # fmt: skip
    (folder / "generation_config.json").unlink(missing_ok=True)
    fields = {**config.to_dict(), "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


# ---------------------------------------------------------------- jackfield plugins new


LIGHT = ("reasoning-parser", "schedule-policy", "command")
"""Kinds whose skeletons are soon tested. The page for newcomers tests the tool parser's."""
QUICK = "not (engine or greedy or prefix_hit or linear_time or costs_the_same)"
"""pytest's -k: without the checks that take longest, which are made of plugins in the box."""


def write_skeletons(kinds: Sequence[str], outside: Outside, folder: Path) -> list[Path]:
    """→ the folders of a new package of each kind"""
    for kind in kinds:
        name = "MineForCausalLM" if kind == "model" else f"mine_{kind.replace('-', '_')}"
        outside.run("jackfield", "plugins", "new", kind, name, cwd=folder)
    return sorted(folder.iterdir())


def run_their_tests(folders: Sequence[Path], outside: Outside, *flags: str) -> None:
    tests = [str(path / "tests") for path in folders]
    output = outside.run("pytest", "-q", "-p", "no:cacheprovider", *flags, *tests)
    assert " passed" in output and "failed" not in output, output


@pytest.mark.slow
def test_the_skeletons_of_all_kinds_pass_their_own_tests(outside: Outside, tmp_path: Path) -> None:
    """All in one environment: they also bear each other."""
    before = outside.plugins()
    folders = write_skeletons(sorted(KINDS), outside, tmp_path)
    outside.install(*folders)
    rows = [row for row in outside.plugins() if row not in before]
    assert {row["kind"].replace("_", "-") for row in rows} == {
        KINDS[kind].plugin or kind for kind in KINDS
    }
    run_their_tests(folders, outside, "--rootdir", str(tmp_path))
    outside.uninstall(*(path.name for path in folders))
    assert outside.plugins() == before


def test_an_example_and_skeletons_come_together_serve_and_go(
    outside: Outside, plain_text: str, tmp_path: Path
) -> None:
    """One of examples/plugins and the light skeletons, installed, tested and served with at once;
    each package alone, and every kind of skeleton, are nightly."""
    before = outside.plugins()
    folders = write_skeletons(LIGHT, outside, tmp_path)
    (example,) = (path for path in PACKAGES if path.name == "jackfield-brackets")
    source = copied(example, tmp_path)
    outside.install(*folders, source)
    shutil.rmtree(source / "src")
    rows = [row for row in outside.plugins() if row not in before]
    brackets = names_of(rows, source.name)
    assert brackets == {"reasoning_parser": "brackets", "tool_parser": "brackets"}
    mine = [row for row in rows if row["distribution"] != source.name]
    assert {row["kind"].replace("_", "-") for row in mine} == set(LIGHT)
    run_their_tests([*folders, source], outside, "--rootdir", str(tmp_path), "-k", QUICK)

    policy = next(row["name"] for row in mine if row["kind"] == "schedule_policy")
    names = {**brackets, "schedule_policy": policy}
    flags = [part for kind, name in names.items() for part in (FLAGS[kind], name)]
    with outside.serving(*flags) as url:
        assert ask(f"{url}/v1/completions", PROMPT)["choices"][0]["text"] == plain_text
        check_calls_are_text(url)
    outside.uninstall(source.name, *(path.name for path in folders))
    assert outside.plugins() == before


def test_a_skeleton_needs_no_formatting(tmp_path: Path) -> None:
    for kind in KINDS:
        assert main(["plugins", "new", kind, "mine", "--into", str(tmp_path / kind)]) == 0
    borrowed = [Path(p).parents[2] / "bin" for p in sys.path if p.endswith("-packages")]
    places = [Path(sys.executable).parent, *borrowed]
    ruff = shutil.which("ruff", path=":".join(map(str, places)))
    assert ruff is not None
    checks = (["format", "--check"], ["check", "--select", "E,F,W,B,UP"])
    for check in checks:
        subprocess.run(
            [ruff, *check, "--line-length", "100", "--isolated", str(tmp_path)], check=True
        )


# ---------------------------------------------------------------- the page for newcomers

PAGE = ROOT / "docs/how-to/write-a-plugin.md"
STEP = re.compile(
    r"^<!-- (runs from nothing|write (\S+)) -->\n+```(\w+)\n(.*?)^```\n+(?:```text\n(.*?)^```)?",
    re.M | re.S,
)
SHOWN = "http://127.0.0.1:8000"
"""The server's address as the page has it."""


def assert_printed(output: str, expected: str, what: str) -> None:
    """`…` in what is expected stands for anything."""
    pattern = re.escape(expected.strip()).replace("…", ".*")
    assert re.search(pattern, output, re.S), f"{what}\n{output}"


@pytest.mark.slow
def test_the_page_takes_a_newcomer_to_a_tool_parser_that_serves(
    outside: Outside, tmp_path: Path
) -> None:
    """Every command and file of the page's first part, in order, in an empty folder."""
    before = outside.plugins()
    steps = list(STEP.finditer(PAGE.read_text()))
    assert len(steps) > 6
    folder, url = tmp_path, ""
    with contextlib.ExitStack() as running:
        for mark, path, language, text, printed in (step.groups() for step in steps):
            if mark.startswith("write "):
                assert (folder / path).is_file(), f"the skeleton has no {path}"
                (folder / path).write_text(text)
            elif language == "python":
                output = outside.run("python", "-c", text.replace(SHOWN, url), cwd=folder)
                assert_printed(output, printed, text)
            else:
                for part in text.split("$ ")[1:]:
                    command, _, expected = part.partition("\n")
                    if command.startswith("cd "):
                        folder = folder / command.removeprefix("cd ")
                    elif command.startswith("jackfield serve "):
                        flags = shlex.split(command)[2:]
                        url = running.enter_context(outside.serving(*flags))
                    else:
                        output = outside.run("bash", "-c", command, cwd=folder)
                        assert_printed(output, expected, command)
    assert outside.plugins() == before
