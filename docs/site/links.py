"""Hooks of mkdocs: pages outside of docs/, the index's navigation, and links to files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CODE = "code"
"""Folder of the site with the README.md of directories."""
LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
SECTION = re.compile(r"^## (.+?):.*?$(.*?)(?=^## |\Z)", re.M | re.S)
PAGE = re.compile(r"^- \[.*?\]\((\S+?\.md)\)", re.M)


def on_config(config: Any) -> Any:
    """Take the navigation from index.md, whose lists are generated."""
    sections = SECTION.findall((DOCS / "index.md").read_text())
    config.nav = [
        {
            "Start": [
                "index.md",
                "structure.md",
                "architecture.md",
                "contributing.md",
                "glossary.md",
            ]
        },
        *({name.split(":")[0]: PAGE.findall(text)} for name, text in sections),
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link outside of docs/: README.md of directories, at any depth."""
    seen: set[Path] = set()
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for *_, target in LINK.findall(FENCE.sub("", page.read_text())):
            path = _readme(_resolve(page, target))
            if path is not None and path not in seen:
                seen.add(path)
                waiting.append(path)
                uri = f"{CODE}/{path.relative_to(ROOT)}"
                files.append(File.generated(config, uri, content=path.read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site; those to other files lose their address."""
    uri = page.file.src_uri
    inside = uri.startswith(f"{CODE}/")
    source = ROOT / uri.removeprefix(f"{CODE}/") if inside else DOCS / uri

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path = _resolve(source, target)
        if path is None:
            return match[0]
        to = _uri(path)
        if to is None:
            base = config.repo_url
            place = path.relative_to(ROOT)
            return f"[{text}]({base.rstrip('/')}/blob/main/{place})" if base and not mark else text
        anchor = target.partition("#")[2]
        relative = os.path.relpath(to, os.path.dirname(uri) or ".")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    parts = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)
    return "".join(p if p.startswith("```") else LINK.sub(link, p) for p in parts)


def _resolve(page: Path, target: str) -> Path | None:
    """Return the file or directory of a relative link; None for others."""
    name = target.partition("#")[0]
    if not name or "://" in name or name.startswith(("mailto:", "/")):
        return None
    path = (page.parent / name).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _readme(path: Path | None) -> Path | None:
    """Return the page of a link outside of docs/, a directory's README.md included."""
    if path is None or path.is_relative_to(DOCS):
        return None
    if path.is_dir():
        path = path / "README.md"
    return path if path.suffix == ".md" and path.is_file() else None


def _uri(path: Path) -> str | None:
    """Return the place of a file in the site; None: it is not in it."""
    if (readme := _readme(path)) is not None:
        return f"{CODE}/{readme.relative_to(ROOT)}"
    inside = path.is_relative_to(DOCS) and path.suffix in (".md", ".png", ".svg", ".jpg")
    return str(path.relative_to(DOCS)) if inside else None
