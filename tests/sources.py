"""What tests ask of the package's source: a process parses each file once for all of them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Imported(NamedTuple):
    """A statement that imports, wherever it stands."""

    node: ast.Import | ast.ImportFrom
    for_types: bool
    """Under TYPE_CHECKING: it does not run."""


@functools.cache
def imports_of(path: Path) -> tuple[Imported, ...]:
    return tuple(_imports(ast.parse(path.read_text()), False))


def _imports(holder: ast.AST, for_types: bool) -> Iterator[Imported]:
    """Of statements alone: expressions have none, and are most of a tree."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        asked = part == "body" and isinstance(holder, ast.If)
        only = for_types or (asked and "TYPE_CHECKING" in ast.unparse(holder.test))
        for child in getattr(holder, part, ()):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield Imported(child, only)
            else:
                yield from _imports(child, only)


def last_name(node: ast.AST) -> str:
    """Of `a.b.c`, or of `c` alone; empty of anything else. Unlike `ast.unparse`, at once."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
