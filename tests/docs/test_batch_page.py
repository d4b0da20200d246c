"""What docs/how-to/batch.md shows is what happens."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_docs import ENVIRONMENT, ROOT, SHOWN, Block, blocks, name_of
from test_structured_page import serving

from jackfield import EngineConfig
from jackfield.entrypoints.batch.objects import BatchOptions
from jackfield.entrypoints.openai.context import ServerOptions

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")

PAGE = ROOT / "docs" / "how-to" / "batch.md"
RUN = [block for block in blocks(PAGE) if block.mark == "runs with batches"]
FILES = [block for block in blocks(PAGE) if block.mark.startswith("batch file: ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that the page shows."""
    made = tmp_path_factory.mktemp("page")
    for block in FILES:
        (made / block.mark.removeprefix("batch file: ")).write_text(block.text)
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    options = ServerOptions(batches=BatchOptions(folder / "batches"))
    config = EngineConfig(device="cpu", served_model_name=("jackfield-tiny",))
    with serving().running(config, options) as server:
        yield server.url


def commands(block: Block) -> Iterator[tuple[list[str], str]]:
    """(what to run, what it prints) of a block."""
    if block.language == "python":
        yield [sys.executable, "-c", block.text], block.expected or ""
        return
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command, expected = part.split("\n", 1)
        yield ["bash", "-c", command], expected


def matches(text: str, expected: str) -> bool:
    """… stands for anything within a line."""
    return re.fullmatch(re.escape(expected).replace("…", ".*"), text) is not None


@pytest.mark.parametrize("block", RUN, ids=name_of)
def test_a_block_does_what_the_page_says(block: Block, url: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{ENVIRONMENT.get('PATH', '')}"
    for argv, expected in commands(block):
        done = subprocess.run(
            [part.replace(SHOWN, url) for part in argv],
            env={**ENVIRONMENT, "PATH": path}, cwd=folder,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert matches(done.stdout, expected), (done.stdout, done.stderr)


def test_the_page_has_blocks_that_run() -> None:
    assert len(RUN) == 2 and len(FILES) == 1
