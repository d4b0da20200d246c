"""docs/reference/hooks.md: every hook with its contract."""

from __future__ import annotations

import inspect
import re
from typing import Any

from markdown_table import table

from jackfield.core import hooks, protocols
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.registry import KINDS, load_plugins

WIDTH = 100
"""Characters of a line of code."""


def hook_page() -> str:
    """Every hook with its contract."""
    plugins = load_plugins()
    kind_of = {hook: kind for kind, hook in KINDS.items()}
    parts = [
        "# Hooks\n\n",
        "Every hook, who calls it and when, and its contract. "
        "Source, and the page to read first: [core/hooks.py](../../core/hooks.py). The contracts "
        "are in [core/protocols/](../../core/protocols/). How to write a plugin: "
        "[write a plugin](../how-to/write-a-plugin.md).\n\n",
        f"Hook API version: {API_VERSION}, which plugins state as `jackfield_api`.\n\n",
    ]
    rows = []
    for name, function in _hooks():
        kind = kind_of.get(name)
        names = "—" if kind is None else ", ".join(
            f"`{e.name}`" for e in sorted(plugins[kind].entries(), key=lambda e: e.name)
            if e.provenance.distribution == hooks.PROJECT
        ) or "none"  # fmt: skip
        about = inspect.getdoc(function) or ""
        rows.append([f"[`{name}`](#{name})", kind or "—", _when(about), names])
    parts.append(table(["hook", "kind", "called by", "in the box"], rows))
    for name, function in _hooks():
        about = inspect.getdoc(function) or ""
        line = f"def {name}{_signature(function)}: ..."
        if len(line) > WIDTH:
            # As ruff formats it: one parameter has a comma after it, several in a line have not.
            comma = "," if len(inspect.signature(function).parameters) == 1 else ""
            line = line.replace("(", "(\n    ", 1).replace(") ->", f"{comma}\n) ->")
        parts.append(f"\n## {name}\n\n```python\n{line}\n```\n\n")
        parts.append(about + "\n")
        for contract in re.findall(r"`protocols\.(\w+)`", about):
            source = inspect.getsource(getattr(protocols, contract)).rstrip()
            parts.append(f"\n```python\n{source}\n```\n")
    return "".join(parts)


def _hooks() -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in vars(hooks).items()
        if inspect.isfunction(value) and hasattr(value, "jackfield_spec")
    ]


def _signature(function: Any) -> str:
    return str(inspect.signature(function)).replace("'", "")


def _when(about: str) -> str:
    caller = re.search(r"(?:Used|Called) by ((?:[^.;:(]|\.(?=\w))+)", about.replace("\n", " "))
    if caller is None:
        raise SystemExit(f"a hook's docstring does not say what it is called by: {about!r}")
    return caller[1].strip()
