"""The documentation as a site: built without warnings, and no link in it is dead."""

from __future__ import annotations

import html.parser
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Page(html.parser.HTMLParser):
    """The links of a page, and what they may lead to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        if tag == "a" and facts.get("href"):
            self.links.add(str(facts["href"]))
        if tag in ("img", "script") and facts.get("src"):
            self.links.add(str(facts["src"]))
        self.ids.update(str(value) for name, value in attrs if name in ("id", "name") and value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material: pip install 'jackfield[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        [*command, "--config-file", str(ROOT / "docs/site/mkdocs.yml")],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_there_and_in_the_index_of_the_search(site: Path) -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "index.md"]
    assert len(pages) > 40
    index = (site / "search" / "search_index.json").read_text()
    for path in pages:
        place = path.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / place).is_file(), place
        assert f'"{place}' in index, place
    assert list((site / "code" / "core" / "parts").glob("*.html"))


def test_no_link_is_dead(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            other = pages.get(target)
            if not target.is_file():
                dead.append((path, link))
            elif parts.fragment and other and unquote(parts.fragment) not in other.ids:
                dead.append((path, link))
    assert not dead, "\n".join(f"{path.relative_to(site)}: {link}" for path, link in dead)
