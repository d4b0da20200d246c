"""docs/reference/public-api.md: what code outside may import."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
from typing import Any

from markdown_table import table

from jackfield.core import hooks
from jackfield.core.hook_versions import API_VERSION


def public_api() -> str:
    """What code outside may import."""
    from jackfield.core.public import PUBLIC

    parts = [
        "# Public modules\n\n",
        "What of Jackfield code outside may import. These names stay and keep their meaning; what "
        "changes so that a plugin must change raises the hook API version "
        f"(now {API_VERSION}, see [hooks](hooks.md)), and what is added to them does not. "
        "Everything else may move or go with any version, whatever its name. "
        "Source: [core/public.py](../../core/public.py); a test holds the packages in "
        "[examples](../../examples/plugins), what `jackfield plugins new` writes and the programs "
        "of this documentation to it.\n",
    ]
    for title, modules in PUBLIC.items():
        parts.append(f"\n## {title}\n")
        for module, names in modules.items():
            imported = importlib.import_module(module)
            rows = [[f"`{name}`", _about(imported, name)] for name in names]
            parts.append(f"\n### {module}\n\n" + table(["name", "what it is"], rows))
    return "".join(parts)


def _about(module: Any, name: str) -> str:
    """The first sentence of a docstring. Raises SystemExit where there is none."""
    value = getattr(module, name)
    text = inspect.getdoc(value) if inspect.isclass(value) or inspect.isfunction(value) else None
    inside = module.__name__ + "."
    parts = [v for k, v in sys.modules.items() if k.startswith(inside)]
    for source in () if text else (module, *parts, hooks):
        text = text or _constant_docs(source).get(name)
    if not text:
        raise SystemExit(f"{module.__name__}.{name} is public and has no docstring")
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.match(r".*?[.:](?=\s|$)", paragraph)
    return (sentence[0] if sentence else paragraph).rstrip(":")


def _constant_docs(module: Any) -> dict[str, str]:
    """Name of a module's constant → the docstring under it."""
    docs = {}
    for node, after in itertools.pairwise(ast.parse(inspect.getsource(module)).body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name):
                    docs[target.id] = after.value.value
    return docs
