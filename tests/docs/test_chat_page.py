"""What docs/how-to/chat-and-completions.md shows is what happens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from test_docs import ENVIRONMENT, ROOT, SHOWN, Block, blocks, name_of
from test_structured_page import serving

from jackfield import EngineConfig

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")

PAGE = ROOT / "docs" / "how-to" / "chat-and-completions.md"
RUN = [block for block in blocks(PAGE) if block.mark == "runs"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = EngineConfig(
        device="cpu",
        served_model_name=("jackfield-tiny",),
        reasoning_parser="think_tags",
        tool_call_parser="hermes",
    )
    with serving().running(config) as server:
        yield server.url


@pytest.mark.parametrize("block", RUN, ids=name_of)
def test_a_block_does_what_the_page_says(block: Block, url: str) -> None:
    text, expected = block.text.replace(SHOWN, url), block.expected
    if block.language == "console":
        command, expected = text.removeprefix("$ ").split("\n", 1)
        argv = ["bash", "-c", command]
    else:
        argv = [sys.executable, "-c", text]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.stdout == expected, done.stderr


def test_the_page_has_blocks_that_run() -> None:
    assert len(RUN) == 5
