"""docs/how-to/embeddings.md does what it shows, on the real MiniLM: curl, Python, and outputs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from encoders import minilm

from jackfield import EngineConfig

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "embeddings.md"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
"""A reader's."""
SHOWN = "http://127.0.0.1:8000"
BLOCK = re.compile(
    r"<!-- runs with MiniLM -->\n```(\w+)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.S
)
BLOCKS = [match.groups() for match in BLOCK.finditer(PAGE.read_text())]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    sys.path.insert(0, str(PAGE.parents[2] / "tests" / "entrypoints"))
    try:
        from serving import running
    finally:
        sys.path.pop(0)
    config = EngineConfig(model=str(minilm()), served_model_name=("minilm",), device="cpu")
    with running(config) as server:
        yield server.url


def check(printed: str, shown: str) -> None:
    """… stands for anything."""
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("…"))
    assert re.fullmatch(pattern, printed.strip(), re.S), printed


def test_the_page_has_blocks() -> None:
    assert [language for language, _, _ in BLOCKS].count("python") == 3
    assert [language for language, _, _ in BLOCKS].count("console") == 2


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks_print_what_is_shown(number: int, url: str) -> None:
    language, text, shown = BLOCKS[number]
    text = text.replace(SHOWN, url)
    if language == "python":
        done = subprocess.run(
            [sys.executable, "-c", text],
            capture_output=True,
            text=True,
            timeout=120,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        check(done.stdout, shown)
        return
    for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$).*\n)*)", text, re.M):
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
        )
        check(done.stdout, printed)
