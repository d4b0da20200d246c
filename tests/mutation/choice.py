"""Chooses which slips to make, and which test files to run for each."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path
from typing import TypeVar

from slips import Slip, slips_of

ROOMS = ("core", "entrypoints", "plugins")
LEFT_OUT = ("entrypoints/bench", "plugins/conformance")
"""Measuring needs a GPU, and kits have planted bugs of their own in `tests/plugins/conformance`."""
WORD = re.compile(r"[A-Za-z_]\w\w+")
MOST_FILES = 8
"""Test files for one slip."""
T = TypeVar("T")


def planned(root: Path, seed: int, rooms: Sequence[str] = ()) -> list[Slip]:
    """Every slip in an order that serves the directories in turn, and in each the kinds.

    The order is by a hash of the slip, so that other code moves none out of its place.
    """

    def rank(slip: Slip) -> str:
        return sha256(f"{seed} {slip.key}".encode()).hexdigest()

    folders: dict[str, dict[str, list[Slip]]] = defaultdict(lambda: defaultdict(list))
    for room in rooms or ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            if rooms or not file.startswith(LEFT_OUT):
                for slip in slips_of(file, path.read_bytes()):
                    folders[path.parent.as_posix()][slip.kind].append(slip)
    kinds = [
        in_turn(sorted(of_kind, key=rank) for of_kind in sorted(folder.values(), key=len))
        for folder in folders.values()
    ]
    return in_turn(kinds)


def in_turn(lists: Iterable[list[T]]) -> list[T]:
    """The first of each, then the second of each, and so on."""
    return [x for x in chain.from_iterable(zip_longest(*lists)) if x is not None]


class Chooser:
    """Which test files speak of a piece of code."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts = {
            path.relative_to(root).as_posix(): path.read_text()
            for path in sorted((root / "tests").rglob("test_*.py"))
            if path.parent.name not in ("docs", "examples", "mutation")
        }
        self._words = {file: set(WORD.findall(text)) for file, text in self.texts.items()}
        self._files_with = Counter(chain.from_iterable(self._words.values()))

    def of(self, slip: Slip) -> list[str]:
        """Test files, the likeliest first: those that import the module, those in the directory
        that mirrors its own, and those with the rare words of its text, above all of the function
        that has the slip."""
        module = "jackfield." + slip.file.removesuffix(".py").replace("/", ".")
        package, _, name = module.rpartition(".")
        imported = re.compile(
            rf"^\s*(from {re.escape(module)} import|import {re.escape(module)}\b"
            rf"|from {re.escape(package)} import .*\b{name}\b)", re.M,
        )  # fmt: skip
        whole = set(WORD.findall((self.root / slip.file).read_text()))
        near = set(WORD.findall(slip.scope))
        mirror = str(Path("tests", slip.file).parent)
        scores: dict[str, float] = {}
        for file, text in self.texts.items():
            words = self._words[file]
            score = sum(self._rarity(word) for word in whole & words)
            score += 3 * sum(self._rarity(word) for word in near & words)
            score /= math.sqrt(200 + len(words))
            score *= 1 + 2 * bool(imported.search(text)) + (str(Path(file).parent) == mirror)
            scores[file] = score
        return sorted(scores, key=scores.__getitem__, reverse=True)[:MOST_FILES]

    def _rarity(self, word: str) -> float:
        return math.log(len(self.texts) / self._files_with[word]) ** 2
