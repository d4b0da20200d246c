"""Which files a checkpoint consists of, and how far they are loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...core.errors import LoadError


class Layout(NamedTuple):
    """How a format names the files of a checkpoint."""

    single: str
    index_file: str
    """A JSON file whose `weight_map` says which file has which tensor."""
    patterns: tuple[str, ...]
    """Of all files, where there is neither."""
    left_out: tuple[str, ...] = ()
    """Files of these patterns that are no weights."""


def files_of(folder: Path, layout: Layout, otherwise: str) -> list[Path]:
    """Return the files of a checkpoint: what its index names; else the single one; else all.

    Raises LoadError, with what to do `otherwise`, when there are none, or one lies elsewhere.
    """
    index = folder / layout.index_file
    if not index.is_file():
        if (folder / layout.single).is_file():
            return [folder / layout.single]
        files = sorted(
            {file for pattern in layout.patterns for file in folder.glob(pattern)}
            - {folder / name for name in layout.left_out}
        )
        if not files:
            raise LoadError(f"no {' or '.join(layout.patterns)} in {folder}; {otherwise}")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [Path(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(
            f"{layout.index_file} cannot be read: {type(error).__name__}: {error}"
        ) from error
    for name, path in zip(names, paths, strict=True):
        if path.name != name:
            raise LoadError(
                f"{layout.index_file} names {name!r}, which is not a file of its own folder"
            )
        if not (folder / name).is_file():
            raise LoadError(f"{layout.index_file} names {name!r}, which is missing")
    return [folder / name for name in names]


def shown(files: Iterable[Path]) -> Iterator[Path]:
    """Yield the files, with a line on the terminal that says how many of their bytes are loaded;
    nothing is shown where there is no terminal."""
    files = list(files)
    if not sys.stderr.isatty():
        yield from files
        return
    sizes = [file.stat().st_size for file in files]
    total, done = max(sum(sizes), 1), 0
    try:
        for number, (file, size) in enumerate(zip(files, sizes, strict=True), 1):
            _show(done, total, number, len(files))
            yield file
            done += size
        _show(done, total, len(files), len(files))
    finally:
        print(file=sys.stderr, flush=True)


def _show(done: int, total: int, number: int, count: int) -> None:
    cells = 30 * done // total
    line = f"\rweights [{'#' * cells}{'.' * (30 - cells)}] {100 * done // total:3d} %"
    print(f"{line}, file {number} of {count}", end="", file=sys.stderr, flush=True)
