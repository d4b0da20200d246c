"""Every marked block of the documentation does what its page shows (marks: tests/docs/pages.py)."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import forked
import pytest
import torch
from encoders import minilm
from pages import BLOCKS, ROOT, SHOWN, Block, commands, name_of, pattern_of

from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL

MARKS = ("runs", "runs with MiniLM", "runs with the plugin", "runs from nothing", "serves")
MARKS_WITH_MORE = ("saved as ", "write ", "file: ", "not run: ")
NUMBERS = r"\d[\d.]*"
THEIR_CHECKPOINTS = ("path/to/", "owner/name")
"""How the reader's own are called."""


def marked(mark: str) -> list[Block]:
    return [block for block in BLOCKS if block.mark == mark]


def begins(block: Block) -> bool:
    """Whether it is of what one reads first."""
    return block.page == "README.md" or block.page.startswith("docs/tutorials/")


def first_by_day(blocks: list[Block]) -> list[Any]:
    """Mark all but a page's first as slow; of what one reads first, none."""
    pages: set[str] = set()
    params = []
    for block in blocks:
        by_day = begins(block) or block.page not in pages
        params.append(pytest.param(block, marks=[pytest.mark.slow] * (not by_day)))
        pages.add(block.page)
    return params


def environment(**more: str) -> dict[str, str]:
    """A reader's: kernels in the interpreter would take the place of the torch backend."""
    subset = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**subset, "PATH": f"{Path(sys.executable).parent}:{subset['PATH']}", **more}


# ---------------------------------------------------------------- running

Output = tuple[int, str, str]
"""Exit status, standard output, standard error."""


@contextlib.contextmanager
def program(
    code: str, folder: Path, seconds: float = 120, **more: str
) -> Iterator[tuple[forked.Popen, TextIO]]:
    """A Python program in a process of its own that runs in `folder`; → it and what it prints.

    Killed after `seconds`. Its standard error is the file `stderr` there.
    """
    with (folder / "stderr").open("w") as errors, forked.Tree(
        [sys.executable, "-c", code], cwd=folder, env=environment(**more), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
    ) as process:  # fmt: skip
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            yield process, process.stdout
        finally:
            late.cancel()
            process.terminate()
            try:
                process.wait(300)
            finally:
                process.kill()


def run_python(code: str, folder: Path, **more: str) -> Output:
    with program(code, folder, **more) as (process, printed):
        output = printed.read()
        process.wait()
    return process.returncode, output, (folder / "stderr").read_text()


def run_command(command: str, folder: Path, **more: str) -> Output:
    """By a shell; without one, where it is a plain command of Python or Jackfield."""
    words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
    plain = not any(set(word) <= set("();<>|&") for word in words) and "$" not in command
    argv = shlex.split(command)
    starts = {"jackfield": [sys.executable, "-m", "jackfield"], "python": [sys.executable]}
    if plain and argv[0] in starts:
        argv = [*starts[argv[0]], *argv[1:]]
    else:
        argv = ["bash", "-c", command]
    completed = forked.run(
        argv, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=300
    )
    return completed.returncode, completed.stdout, completed.stderr


@contextlib.contextmanager
def serving(*flags: str, folder: Path, **more: str) -> Iterator[str]:
    """`jackfield serve` on a free port; → its address."""
    argv = ["serve", *flags, "--port", "0"]
    code = f"from jackfield.entrypoints.cli.main import main\nraise SystemExit(main({argv!r}))"
    # As long as a busy machine takes for all blocks of a page.
    with program(code, folder, seconds=1800, **more) as (_, printed):
        line = printed.readline()
        match = re.search(r"(https?)://[\d.]+(:\d+)", line)
        assert match is not None, f"{flags}: {line}{(folder / 'stderr').read_text()}"
        (folder / "ready").write_text(line)
        yield f"{match[1]}://127.0.0.1{match[2]}"


def run_block(block: Block, url: str, folder: Path, **more: str) -> None:
    """Run it, and compare with what the page shows."""
    for other in BLOCKS:
        if other.page == block.page and other.mark.startswith("saved as "):
            (folder / other.mark.removeprefix("saved as ")).write_text(other.text)
    if block.language == "python":
        completed = run_python(block.text.replace(SHOWN, url), folder, **more)
        compare(block.text, completed, block.expected)
        return
    assert block.language == "console"
    for command, shown in commands(block):
        compare(command, run_command(here(command, url), folder, **more), shown)


def compare(what: str, completed: Output, shown: str | None) -> None:
    status, printed, errors = completed
    assert status == 0, f"{what}\n{printed}{errors}"
    if shown is None:  # A reader could not tell whether it is as it should be.
        assert not printed.strip(), f"{what}\nprints what the page does not show:\n{printed}"
    else:
        assert re.fullmatch(pattern_of(shown), printed.rstrip() + "\n"), f"{what}\n{printed}"


def here(command: str, url: str) -> str:
    """The same command for the server at `url`."""
    if "curl" in command and shutil.which("curl") is None:
        pytest.skip("curl is not here")
    command = command.replace(SHOWN, url)
    return f"{command} --url {url}" if re.match(r"jackfield (chat|complete) ", command) else command


# ---------------------------------------------------------------- blocks and marks


def test_marks_are_known() -> None:
    for block in BLOCKS:
        known = block.mark in ("", *MARKS) or block.mark.startswith(MARKS_WITH_MORE)
        assert known or block.language == "", f"{name_of(block)}: {block.mark}"


def test_what_a_guide_shows_is_run_or_says_why_not() -> None:
    for block in BLOCKS:
        if block.page.startswith(("docs/how-to/", "docs/tutorials/")):
            assert block.mark or block.language not in ("bash", "console", "python"), name_of(block)


@pytest.mark.parametrize("language", ["python", "toml", "json"])
def test_code_parses(language: str) -> None:
    selection = [block for block in BLOCKS if block.language == language]
    assert selection
    for block in selection:
        try:
            if language == "python":
                text = block.text if block.text[0] != " " else f"if True:\n{block.text}"
                compile(text, name_of(block), "exec")
            elif language == "toml":
                tomllib.loads(block.text)
            elif block.mark.endswith(".jsonl"):
                [json.loads(line) for line in block.text.splitlines()]
            else:
                json.loads(block.text)
        except (SyntaxError, ValueError) as error:
            pytest.fail(f"{name_of(block)}: {error}")


def test_listings_are_what_the_files_have() -> None:
    listed = [block for block in BLOCKS if block.mark.startswith("file: ")]
    assert len(listed) > 4
    for block in listed:
        file = ROOT / block.mark.removeprefix("file: ")
        assert block.text in file.read_text(), f"{name_of(block)} is not in {file.name}"


# ---------------------------------------------------------------- with a server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded model, as the tutorial serves it; with batches, too."""
    with serving("--batch-dir", "batches", folder=tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.mark.parametrize("block", first_by_day(marked("runs")), ids=name_of)
def test_a_block_does_what_the_page_shows(block: Block, server: str, tmp_path: Path) -> None:
    run_block(block, server, tmp_path)


def picture() -> Block:
    """README's picture of a terminal, as the console block that it shows."""
    source = (ROOT / "docs/images/terminal.svg").read_text()
    lines = [html.unescape(line) for line in re.findall(r"<text [^>]*>(.*)</text>", source)]
    return Block("docs/images/terminal.svg", 1, "console", "\n".join(lines) + "\n", "runs", None)


def test_the_picture_shows_what_the_commands_print(server: str, tmp_path: Path) -> None:
    (serve, ready), *others = commands(picture())
    assert serve == "jackfield serve" and len(others) == 2
    (shown,) = [
        lines for block in marked("serves") for command, lines in commands(block)
        if (block.page, command) == ("docs/tutorials/first-server.md", serve)
    ]  # fmt: skip
    same = re.sub(NUMBERS, "0", shown)
    assert re.fullmatch(pattern_of(re.sub(NUMBERS, "0", ready)), same)
    for command, shown in others:
        compare(command, run_command(here(command, server), tmp_path), shown)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = (str(minilm()), "--served-model-name", "minilm")
    with serving(*flags, folder=tmp_path_factory.mktemp("encoder")) as url:
        yield url


@pytest.mark.parametrize("block", marked("runs with MiniLM"), ids=name_of)
def test_a_block_about_vectors_does_what_the_page_shows(
    block: Block, encoder: str, tmp_path: Path
) -> None:
    run_block(block, encoder, tmp_path)


# ---------------------------------------------------------------- servers


def servers() -> Iterator[Any]:
    """Of a page that one does not read first, the first by day, and those that speak TLS."""
    pages: set[str] = set()
    for block in marked("serves"):
        for number, (command, shown) in enumerate(commands(block)):
            by_day = begins(block) or block.page not in pages or "--ssl" in command
            marks = [pytest.mark.slow] * (not by_day)
            pages.add(block.page)
            yield pytest.param(command, shown, id=f"{name_of(block)}-{number}", marks=marks)


@pytest.mark.parametrize(("command", "shown"), servers())
def test_a_server_comes_up_as_the_page_shows(command: str, shown: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    at = words.index("jackfield")
    more = dict(word.split("=", 1) for word in words[:at])
    assert words[at + 1] == "serve"
    flags = [str(EMBEDDED_MODEL) if w.startswith(THEIR_CHECKPOINTS) else w for w in words[at + 2 :]]
    context = None
    if "--ssl-certfile" in flags:
        make_certificate(tmp_path)
        context = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
    for block in BLOCKS:
        if block.mark.startswith("saved as ") and block.mark[len("saved as ") :] in flags:
            text = block.text.replace("path/to/checkpoint", str(EMBEDDED_MODEL))
            (tmp_path / block.mark.removeprefix("saved as ")).write_text(text)
    with serving(*flags, folder=tmp_path, **more) as url:
        if shown and not torch.cuda.is_available():  # The page is written on a machine without.
            line = (tmp_path / "ready").read_text()
            assert re.sub(NUMBERS, "0", line) == re.sub(NUMBERS, "0", shown)
        with urllib.request.urlopen(f"{url}/health", timeout=300, context=context) as response:
            assert response.status == 200


def make_certificate(folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "server.key", "-out", "server.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


# ---------------------------------------------------------------- the plugin of the tutorial


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with examples/plugin_template built and installed in it."""
    folder = tmp_path_factory.mktemp("plugin")
    skipped = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*")
    shutil.copytree(ROOT / "examples/plugin_template", folder / "source", ignore=skipped)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-q",
         "--target", str(folder / "site"), str(folder / "source")],
        check=True, timeout=300,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("block", marked("runs with the plugin"), ids=name_of)
def test_the_plugin_does_what_the_tutorial_shows(
    block: Block, installed: Path, tmp_path: Path
) -> None:
    if "jackfield serve " not in block.text:
        return run_block(block, SHOWN, tmp_path, PYTHONPATH=forked.python_path(installed / "site"))
    [(command, _)] = commands(block)
    (call,) = [
        other
        for other in BLOCKS
        if other.page == "docs/tutorials/first-server.md" and "tools=[weather]" in other.text
    ]
    flags = shlex.split(command)[2:]
    with serving(*flags, folder=tmp_path, PYTHONPATH=forked.python_path(installed / "site")) as url:
        run_block(call, url, tmp_path)


def test_the_plugins_own_tests_pass(installed: Path) -> None:
    completed = forked.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=installed / "source", capture_output=True, text=True, timeout=300,
        env=environment(PYTHONPATH=forked.python_path(installed / "site")),
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout
    assert " passed" in completed.stdout
