"""The files of a checkpoint, and a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ...core.errors import CheckpointNotFound, LoadError
from ...core.loading.json_file import check_fetched


class Layout(NamedTuple):
    """A format's file names."""

    single: str
    index_file: str
    """A JSON file whose `weight_map` maps tensors to files."""
    patterns: tuple[str, ...]
    """Patterns of all files, used without an index or a single file."""
    left_out: tuple[str, ...] = ()
    """Patterns of files that are not weights."""


def files_of(folder: Path, layout: Layout, otherwise: str) -> list[Path]:
    """Return a checkpoint's files: the index's; else the single one; else all.

    Raises LoadError, with what to do `otherwise`, when there are none, or one lies elsewhere, is no
    file or was not fetched.
    """
    files = _files_of(folder, layout, otherwise)
    for file in files:
        if not file.is_file():
            link = file.is_symlink() and not file.exists()
            kind = f"a link to {file.readlink()}, which is missing" if link else "no file"
            raise LoadError(f"model: {file} is {kind}", param="model")
        check_fetched(file)
    return files


def _files_of(folder: Path, layout: Layout, otherwise: str) -> list[Path]:
    index = folder / layout.index_file
    if not index.is_file():
        if (folder / layout.single).is_file():
            return [folder / layout.single]
        files = sorted(
            {file for pattern in layout.patterns for file in folder.glob(pattern)}
            - {folder / name for name in layout.left_out}
        )
        if not files:
            raise CheckpointNotFound(
                f"model: no {' or '.join(layout.patterns)} in {folder}; {otherwise}", param="model"
            )
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


class Bar:
    """A progress line on the terminal, if there is one."""

    CELLS = 30

    def __init__(self, total: int) -> None:
        """total: bytes to load."""
        self._total, self._done, self._percent = max(total, 1), 0, -1
        self._shows = sys.stderr.isatty()

    @classmethod
    def of(cls, files: Iterable[Path]) -> Bar:
        return cls(sum(file.stat().st_size for file in files))

    def __enter__(self) -> Bar:
        self.add(0)
        return self

    def add(self, size: int) -> None:
        self._done = min(self._done + size, self._total)
        percent = 100 * self._done // self._total
        if self._shows and percent != self._percent:
            self._percent = percent
            cells = self.CELLS * self._done // self._total
            line = f"\rweights [{'#' * cells}{'.' * (self.CELLS - cells)}] {percent:3d} %"
            print(f"{line} of {self._total / 1e9:.1f} GB", end="", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.add(self._total)  # What stands in the files beside the tensors.
        if self._shows:
            print(file=sys.stderr, flush=True)
