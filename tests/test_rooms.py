"""The rooms of the package: which way imports run between them, and how many of its
neighbours a file needs.

Imports under TYPE_CHECKING are left out; imports within functions count. A `__init__.py` belongs
to its folder.
"""

from __future__ import annotations

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from sources import imports_of

import jackfield

ROOT = Path(jackfield.__file__).resolve().parent
FACES = ("core/text/parsing.py", "core/types.py", "entrypoints/openai/server.py")
"""Public paths that only re-export what is elsewhere: nothing inside the package needs them."""
FLOORS = (
    ("entrypoints/models",),
    ("entrypoints/flags",),
    ("entrypoints/http",),
    ("entrypoints/openai/common",),
    (
        "entrypoints/openai/audio",
        "entrypoints/openai/chat",
        "entrypoints/openai/completions",
        "entrypoints/openai/pooling",
    ),
    ("entrypoints/openai/responses",),
    ("entrypoints/anthropic", "entrypoints/ollama", "entrypoints/batch", "entrypoints/web"),
    ("entrypoints/server",),
    ("entrypoints/bench",),
    ("entrypoints/cli",),
)
"""Lowest first: a room imports from those below it; of its own floor, from itself alone."""
MAX_NEIGHBOURS = 10
"""Files of its own folder that a file imports, at most."""
WIDE = {
    "entrypoints/cli/main.py": "a list of commands, each imported when it is called",
    "core/engine/core.py": "puts the pieces of an engine together, and has one class",
}
KNOWN_ARROWS = {
    ("core/engine", "core/make_core.py"): (
        "AsyncEngine(config) makes its core itself, and that may be PooledCores, which are clients "
        "of engines"
    ),
    ("core/nn/operations.py", "core/nn/latent"): "Operations inherits those of latent attention",
    ("core/nn/operations.py", "core/nn/state"): "Operations inherits those of states",
    ("core/nn/context.py", "core/nn/state"): "a step's context has the rows that states read",
    ("core/worker/sampling", "core/worker/launched_step.py"): (
        "prompts' log-probabilities are in the form in which a step has them"
    ),
}
"""From one room to another that needs it, and why nonetheless."""


def _source_files() -> dict[str, Path]:
    rooms = ("core", "plugins", "kernels", "entrypoints")
    paths = (path for room in rooms for path in (ROOT / room).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path for path in paths}


FILES = _source_files()


def _file_of(module: str) -> str | None:
    """Return the file of a module of this package; None for any other name."""
    base = module.replace(".", "/").removeprefix("jackfield/")
    return next((name for name in (f"{base}.py", f"{base}/__init__.py") if name in FILES), None)


def _imports(name: str, path: Path) -> set[str]:
    """Return the files of this package that one of them imports when it runs."""
    package = ["jackfield", *Path(name).parent.parts]
    files: set[str | None] = set()
    for node, for_types in imports_of(path):
        if for_types:
            continue
        if isinstance(node, ast.Import):
            files |= {_file_of(alias.name) for alias in node.names}
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        files |= {_file_of(f"{module}.{alias.name}") or _file_of(module) for alias in node.names}
    return {file for file in files if file is not None} - {name}


@functools.cache
def _all_imports() -> dict[str, set[str]]:
    """Return the imports of each file, the faces' excepted."""
    return {name: _imports(name, path) for name, path in FILES.items() if name not in FACES}


def _inner_imports() -> dict[str, set[str]]:
    """Return the imports of each file from files that are no faces."""
    return {name: targets - set(FACES) for name, targets in _all_imports().items()}


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_files() -> None:
    assert not _cycle(_inner_imports())


def _arrows(room: str) -> dict[str, set[str]]:
    """Return which of the folders and files of a room import which others of it. A file beside
    folders is a room like them."""
    depth = 0 if room == "." else len(Path(room).parts)
    arrows: dict[str, set[str]] = {}
    for name, targets in _inner_imports().items():
        for target in targets:
            if depth and not all(file.startswith(f"{room}/") for file in (name, target)):
                continue
            first, second = ("/".join(Path(f).parts[: depth + 1]) for f in (name, target))
            if first != second and "__init__.py" not in (Path(first).name, Path(second).name):
                arrows.setdefault(first, set()).add(second)
    return arrows


@pytest.mark.parametrize("room", sorted({str(p) for name in FILES for p in Path(name).parents}))
def test_no_circle_of_rooms(room: str) -> None:
    """Folders and files beside each other import in one direction."""
    arrows = _arrows(room)
    for first, second in KNOWN_ARROWS:
        arrows.get(first, set()).discard(second)
    assert not _cycle(arrows)


@pytest.mark.parametrize(("first", "second"), KNOWN_ARROWS)
def test_an_arrow_is_excepted_only_while_it_closes_a_circle(first: str, second: str) -> None:
    arrows = _arrows(str(Path(first).parent))
    assert second in arrows[first]
    for one, other in KNOWN_ARROWS.keys() - {(first, second)}:
        arrows.get(one, set()).discard(other)
    assert _cycle(arrows)


def test_no_file_needs_too_many_of_its_neighbours() -> None:
    wide = set()
    for name, targets in _inner_imports().items():
        neighbours = [
            target
            for target in targets
            if Path(target).parent == Path(name).parent and Path(target).name != "__init__.py"
        ]
        if len(neighbours) > MAX_NEIGHBOURS and Path(name).name != "__init__.py":
            wide.add(name)
    assert wide == WIDE.keys()


def test_entrypoints_import_from_the_floors_below() -> None:
    floor_of = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

    def room_of(file: str) -> str | None:
        return next((room for room in floor_of if file.startswith(f"{room}/")), None)

    assert floor_of.keys() <= {str(parent) for name in FILES for parent in Path(name).parents}
    for name, targets in _inner_imports().items():
        room = room_of(name)
        for target in targets:
            other = room_of(target)
            if room is not None and other is not None and room != other:
                assert floor_of[other] < floor_of[room], f"{name} imports {target}"


@pytest.mark.parametrize("name", FACES)
def test_faces_only_re_export(name: str) -> None:
    for node in ast.parse(FILES[name].read_text()).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert docstring or names or isinstance(node, ast.ImportFrom), ast.unparse(node)
    assert [file for file, targets in _all_imports().items() if name in targets] == []
