"""What is public (core/public.py): it exists, and outside packages import nothing else.

Also the README's counts and lists, against what is registered.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pages import BLOCKS, ROOT
from test_docs import generator

from jackfield.core.public import PUBLIC
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.cli.skeleton import KINDS, write_skeleton

NAMES = {
    (module, name) for modules in PUBLIC.values() for module, names in modules.items()
    for name in names
}  # fmt: skip
PLUGIN_FOLDERS = ("examples/plugins", "examples/plugin_template")
INTERNAL_PAGES = ("docs/architecture.md", "CHANGELOG.md")


def imported(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from Jackfield; the name is "" for a module as a whole."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jackfield":
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.split(".")[0] == "jackfield":
                yield from ((node.module, alias.name) for alias in node.names)


def private(source: str) -> list[tuple[str, str]]:
    return [item for item in imported(source) if item not in NAMES]


def test_every_public_name_exists_and_is_listed_once() -> None:
    for module, name in NAMES:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"
    modules = [module for section in PUBLIC.values() for module in section]
    assert len(modules) == len(set(modules))


def test_what_is_private_is_noticed() -> None:
    assert private("from jackfield.core.scheduling.queues.queue import RequestQueue")
    assert private("import jackfield.core.registry")
    assert private("def f():\n    from jackfield.core.registry import KINDS")
    assert private("from jackfield import hookimpl\nimport jackfield_mine") == []


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS)
def test_packages_outside_the_tree_import_public_names_alone(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts]
    assert len(files) > 2
    for path in files:
        assert private(path.read_text()) == [], path.relative_to(ROOT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_imports_public_names_alone(kind: str, tmp_path: Path) -> None:
    folder = write_skeleton(kind, "Mine", tmp_path)
    for path in folder.rglob("*.py"):
        assert private(path.read_text()) == [], path.name


def test_programs_of_the_documentation_import_public_names_alone() -> None:
    for block in BLOCKS:
        if block.language == "python" and block.page not in INTERNAL_PAGES:
            text = block.text if block.text[0] != " " else f"if True:\n{block.text}"
            assert private(text) == [], f"{block.page}:{block.line}"


# ---------------------------------------------------------------- what hooks and contracts name

CONTRACTS = ("jackfield.core.protocols", "jackfield.core.tenancy", "jackfield.core.step",
             "jackfield.core.outputs", "jackfield.core.nn.operations", "jackfield.core.nn.context",
             "jackfield.core.cache.groups", "jackfield.core.parallel.ranks")  # fmt: skip
"""Modules of the types whose own methods and attributes a plugin reads or implements. Of other
types (a configuration, a request) a plugin needs the name alone."""


@functools.cache
def module_tree(module: str) -> tuple[ast.Module, dict[str, tuple[str, str]]]:
    """A module's source, and where its names come from, those for type checkers among them."""
    imported = importlib.import_module(module)
    assert imported.__file__
    tree = ast.parse(Path(imported.__file__).read_text())
    names = {n.name: (module, n.name) for n in tree.body if isinstance(n, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(relative, imported.__package__)
            names |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return tree, names


def annotated(node: ast.AST) -> Iterator[str]:
    """Names in an annotation; one that is a text is read, too."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            with contextlib.suppress(SyntaxError):  # Of a Literal.
                yield from annotated(ast.parse(part.value, mode="eval"))


def types_of(module: str, nodes: Iterable[ast.stmt]) -> Iterator[tuple[type, str]]:
    """Classes of core in the annotations of public functions and attributes, and where."""
    _, names = module_tree(module)
    for node in nodes:
        annotations: list[ast.AST] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = node.name
            arguments = [n for n in ast.walk(node.args) if isinstance(n, ast.arg)]
            annotations += [n.annotation for n in arguments if n.annotation]
            annotations += [node.returns] if node.returns else []
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            where, annotations = node.target.id, [node.annotation]
        if not annotations or (where.startswith("_") and where != "__init__"):
            continue
        for name in itertools.chain.from_iterable(map(annotated, annotations)):
            source, attribute = names.get(name, ("", ""))
            if source.startswith("jackfield.core"):
                value = getattr(importlib.import_module(source), attribute)
                if isinstance(value, type):
                    yield value, where


def named_by_hooks() -> dict[type, str]:
    """Classes that hooks name, in signatures and as their contract, and then those that these name
    in public methods and attributes → where."""
    module = "jackfield.core.hooks"
    tree, _ = module_tree(module)
    todo = list(types_of(module, tree.body))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for page, name in re.findall(r"`(protocols|tenancy)\.(\w+)`", ast.get_docstring(node)):
                contract = getattr(importlib.import_module(f"jackfield.core.{page}"), name)
                todo.append((contract, node.name))
    found: dict[type, str] = {}
    while todo:
        kind, where = todo.pop()
        if kind in found:
            continue
        found[kind] = where
        for base in kind.__mro__ if kind.__module__.startswith(CONTRACTS) else ():
            if base.__module__.startswith("jackfield.core"):
                tree, _ = module_tree(base.__module__)
                bodies = [
                    node.body for node in tree.body
                    if isinstance(node, ast.ClassDef) and node.name == base.__name__
                ]  # fmt: skip
                todo += [
                    (other, f"{kind.__name__}.{member}")
                    for body in bodies for other, member in types_of(base.__module__, body)
                ]  # fmt: skip
    return found


def test_every_type_that_a_hook_or_its_contract_names_is_public() -> None:
    values = [getattr(importlib.import_module(module), name) for module, name in NAMES]
    public = {value for value in values if isinstance(value, type)}
    found = named_by_hooks()
    assert len(found) > 80
    missing = [f"{k.__module__} {k.__name__}: {at}" for k, at in found.items() if k not in public]
    assert not missing, "core/public.py lacks what plugins need:\n" + "\n".join(sorted(missing))


# ---------------------------------------------------------------- the README


def test_the_readmes_counts_are_those_of_the_registries() -> None:
    assert generator().readme() == (ROOT / "README.md").read_text(), "run: python docs/generate.py"


def plain(text: str) -> str:
    """Letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def test_the_families_that_the_models_page_names_are_there() -> None:
    """Items of its lists by kind; what is in brackets is the name in config.json."""
    text = (ROOT / "docs/reference/models.md").read_text().partition("In the table:")[0]
    lists = re.findall(r"^- \*\*(.+?)\*\*: (.*?)(?=^- |\Z)", text, re.M | re.S)
    names = {plain(entry.name) for entry in load_plugins()["model"].entries()}
    lines = [" ".join(items.split()).split(": ")[0] for kind, items in lists if kind != "Others"]
    items = [
        re.sub(r".*\((\w+)\)", r"\1", item)
        for line in lines
        for item in re.split(r", | to | and (?:more|dozens more)", line)
    ]
    families = [plain(item) for item in items if plain(item)]
    assert len(families) > 50
    for family in families:
        assert any(name.startswith(family) for name in names), family


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("docs/how-to/quantize.md", "quantization"),
        ("docs/how-to/structured-outputs.md", "structured_backend"),
        ("docs/how-to/kv-connectors.md", "kv_connector"),
    ],
)
def test_the_page_of_a_kind_names_what_is_in_the_box(page: str, kind: str) -> None:
    """Each module: several names may stand for one."""
    text = plain((ROOT / page).read_text())
    for entry in load_plugins()[kind].entries():
        if entry.provenance.distribution == "jackfield":
            module = entry.reference.partition(":")[0].rpartition(".")[2]
            assert plain(module) in text, module
