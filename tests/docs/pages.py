"""The pages of the documentation, and the fenced blocks in them with their marks.

Marks, each before a fenced block:

    <!-- runs -->                   python or console, with a server on the embedded model at hand;
                                    a text block right after python, and the lines after a console
                                    command, are what it prints: … stands for anything in a line,
                                    and alone in a line for any lines
    <!-- runs with MiniLM -->       the same, with a server on all-MiniLM-L6-v2
    <!-- runs with the plugin -->   the same, with examples/plugin_template installed
    <!-- serves -->                 each `jackfield serve` comes up (with the embedded checkpoint)
    <!-- saved as PATH -->          the block is a file that the page's other blocks find
    <!-- not run: REASON -->
    <!-- file: PATH -->             the block is a part of that file
    <!-- runs from nothing -->      in a fresh environment with Jackfield, in order; and
    <!-- write PATH -->             the block as a file (tests/examples/test_outside_packages.py)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import jackfield

ROOT = Path(jackfield.__file__).resolve().parent


def _pages(*folders: str) -> list[Path]:
    """Pages below the folders but those of tools, which are in folders like `.pytest_cache`."""
    found = (page for folder in folders for page in (ROOT / folder).rglob("*.md"))
    return sorted(page for page in found if not re.search(r"(^|/)\.", str(page.relative_to(ROOT))))


ROOM_PAGES = _pages("core", "plugins", "kernels", "entrypoints")
"""Pages in the directories that they describe, for whoever edits these."""
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *_pages("docs", "examples"), *ROOM_PAGES]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
MARK = re.compile(r"<!-- ([^>]*) -->\n+\Z")
SHOWN = "http://127.0.0.1:8000"
"""The server's address as the pages have it."""


class Block(NamedTuple):
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    expected: str | None
    """The text block right after it."""


def blocks(page: Path) -> list[Block]:
    source = page.read_text()
    found = list(FENCE.finditer(source))
    parts = []
    for number, match in enumerate(found):
        mark = MARK.search(source[: match.start()])
        after = found[number + 1] if number + 1 < len(found) else None
        expected = None
        if after is not None and after[1] == "text":
            if not source[match.end() : after.start()].strip():
                expected = after[2]
        line = source[: match.start()].count("\n") + 1
        name = str(page.relative_to(ROOT))
        parts.append(Block(name, line, match[1], match[2], mark[1] if mark else "", expected))
    return parts


BLOCKS = [block for page in PAGES for block in blocks(page)]


def name_of(value: object) -> str:
    return f"{value.page}:{value.line}" if isinstance(value, Block) else str(value)


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, what the page shows that it prints) of a console block."""
    parts = re.split(r"^\$ ", block.text, flags=re.M)[1:]
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def pattern_of(shown: str) -> str:
    """A regular expression for what a page shows."""
    return "".join(
        "(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + "\n"
        for line in shown.splitlines()
    )
