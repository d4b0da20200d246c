"""Writes the reference pages that the code itself is the source of.

    python docs/generate.py           # write docs/reference/*.md and the list of pages in index.md
    python docs/generate.py --check   # exit 1 and name the pages that are out of date

Each page has a file beside this one.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from jackfield.core import hooks
from jackfield.core.registry import load_plugins

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
from api_page import public_api  # noqa: E402
from cli_page import cli  # noqa: E402
from combinations_page import combinations  # noqa: E402
from fields_page import fields  # noqa: E402
from hooks_page import hook_page  # noqa: E402
from metrics_page import metrics  # noqa: E402
from models_page import models  # noqa: E402
from options_page import options  # noqa: E402
from parsers_page import parsers  # noqa: E402
from routes_page import routes  # noqa: E402
from struct_pages import engine_config, sampling_params  # noqa: E402

NOTE = "<!-- Written by docs/generate.py from the code. Change the code, then run it. -->\n\n"
FOLDERS = {
    "tutorials": "Tutorials: learn by doing",
    "how-to": "How-to: reach a goal",
    "reference": "Reference: look it up",
    "explanation": "Explanation: understand why",
}


# ---------------------------------------------------------------- the list of pages


def title_and_first_sentence(page: Path) -> tuple[str, str]:
    """A page's heading, and the first sentence under it."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S).strip()
    title, _, rest = text.partition("\n")
    paragraph = " ".join(rest.strip().split("\n\n")[0].split())
    paragraph = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    sentence = re.match(r".*?\.(?=\s|$)", paragraph)
    return title.removeprefix("# "), sentence[0] if sentence else paragraph


def index(pages: dict[str, str]) -> str:
    """index.md with its list of pages renewed."""
    text = (DOCS / "index.md").read_text()
    parts = []
    for folder, heading in FOLDERS.items():
        parts.append(f"## {heading}\n\n")
        names = {p.name for p in (DOCS / folder).glob("*.md")}
        names |= {Path(name).name for name in pages if name.startswith(f"{folder}/")}
        for name in sorted(names, key=lambda name: (name != "first-server.md", name)):
            title, about = title_and_first_sentence(DOCS / folder / name)
            parts.append(f"- [{title}]({folder}/{name}): {about}\n")
        parts.append("\n")
    begin, end = "<!-- pages -->\n", "<!-- end of pages -->"
    head, _, rest = text.partition(begin)
    return head + begin + "\n" + "".join(parts) + end + rest.partition(end)[2]


# ---------------------------------------------------------------- the README


def families() -> tuple[list[str], list[str]]:
    """Families of language models, and of encoders: what architectures begin with."""
    registry = load_plugins()["model"]
    own = [e.name for e in registry.entries() if e.provenance.distribution == hooks.PROJECT]
    encoders = {_family(name) for name in own if not getattr(registry.load(name), "causal", True)}
    language = {_family(name) for name in own if name.endswith("ForCausalLM")} - encoders
    return sorted(language), sorted(encoders)


def _family(architecture: str) -> str:
    return re.sub(r"(Text)?(For[A-Z]\w+|Model)$", "", architecture)


def readme() -> str:
    """README.md with its counts renewed."""
    plugins = load_plugins()

    def count(kind: str) -> int:
        entries = plugins[kind].entries()
        return sum(e.provenance.distribution == hooks.PROJECT for e in entries)

    language, encoders = families()
    outside = len(list((DOCS.parent / "examples" / "plugins").glob("*/pyproject.toml")))
    text = (DOCS.parent / "README.md").read_text()
    for pattern, sentence in (
        (
            r"\w+ families of language models, \w+ of\s+encoders",
            f"{len(language)} families of language models, {len(encoders)} of encoders",
        ),
        (
            r"\w+ tool-call and \w+ reasoning dialects",
            f"{count('tool_parser')} tool-call and {count('reasoning_parser')} reasoning dialects",
        ),
        (r"\w+ more\]\(examples/plugins\)", f"{outside} more](examples/plugins)"),
        (r"\w+ packages outside the tree\]", f"{outside} packages outside the tree]"),
    ):
        text, changes = re.subn(pattern, sentence, text)
        if changes != 1:
            raise SystemExit(f"README.md does not say once: {pattern}")
    return text


PAGES: dict[str, Callable[[], str]] = {
    "reference/engine-config.md": engine_config,
    "reference/sampling-params.md": sampling_params,
    "reference/cli.md": cli,
    "reference/combinations.md": combinations,
    "reference/hooks.md": hook_page,
    "reference/fields.md": fields,
    "reference/metrics.md": metrics,
    "reference/models.md": models,
    "reference/parsers.md": parsers,
    "reference/public-api.md": public_api,
    "reference/routes.md": routes,
    "reference/vllm-options.md": options,
}


def render() -> dict[str, str]:
    """Page → its text as the code has it now."""
    return {name: NOTE + make() for name, make in PAGES.items()}


def check_installed(pyproject: str, installed: set[str]) -> None:
    """Raise SystemExit if the installation lacks entry points of pyproject.toml, or has more: pages
    that list plugins would be wrong.

    pyproject: its text. installed: names of the entry points of this distribution's plugins.
    """
    declared = set(tomllib.loads(pyproject)["project"]["entry-points"][hooks.PROJECT])
    differing = sorted(declared ^ installed)
    if differing:
        raise SystemExit(
            f"the installed {hooks.PROJECT} has other entry points than pyproject.toml "
            f"({', '.join(differing)}): install it again (pip install --no-deps -e .), then run "
            "this once more"
        )


def installed_plugins() -> set[str]:
    """Return the names of the entry points of this distribution's plugins, as it is installed."""
    points = metadata.entry_points(group=hooks.PROJECT)
    return {point.name for point in points if point.dist and point.dist.name == hooks.PROJECT}


def main() -> int:
    """→ exit status"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    check_installed((DOCS.parent / "pyproject.toml").read_text(), installed_plugins())
    pages = render()
    stale = []
    for name, text in pages.items():
        path = DOCS / name
        if not path.is_file() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    counted = readme()
    if counted != (DOCS.parent / "README.md").read_text():
        stale.append("../README.md")
        if not check:
            (DOCS.parent / "README.md").write_text(counted)
    listed = index(pages)
    if listed != (DOCS / "index.md").read_text():
        stale.append("index.md")
        if not check:
            (DOCS / "index.md").write_text(listed)
    for name in stale:
        print(f"{'out of date' if check else 'written'}: docs/{name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
