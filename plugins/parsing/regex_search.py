r"""Searches text in pieces for several patterns, in linear time.

A pattern matches as in Python's `re`; of several, the earliest match counts, then the longest, then
the first pattern. The pieces do not matter. All threads of a simulated automaton advance together,
without backtracking; known steps are cached.

`google-re2` does not fit: its `\w`, `\d` and `\s` are ASCII, counts end at 1,000, and it cannot
tell where a match may begin or grow, so how much text to hold back.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from .regex_program import Program

MAX_KNOWN = 4096
"""Most cached characters and steps of a pattern."""
_Data = tuple[int, ...]
"""A thread's beginning, then beginning and end of each group."""
_Move = tuple[int, tuple[int, ...]]
"""Source thread (-1: a new one), and slots set to the position."""


class Match(NamedTuple):
    """A match. Positions count from the beginning of the text."""

    pattern: int
    start: int
    end: int
    groups: dict[str, tuple[int, int]]
    """Group name → beginning and end."""


class _Step(NamedTuple):
    """Effect of a character on a list of threads."""

    state: tuple[int, ...]
    moves: tuple[_Move, ...]
    matched: _Move | None
    stable: bool
    """Whether repeating the character changes nothing more."""


class Pattern:
    """A program and the longest match, for any number of searches."""

    def __init__(self, program: Program, limit: int | None = None) -> None:
        """limit: most characters of a match; None: any number."""
        self.program = program
        self.limit = limit
        self.sources = sorted({node.char.source for node in program.nodes if node.char is not None})
        self._steps: dict[tuple[tuple[int, ...], int, bool], _Step] = {}

    def step(self, state: tuple[int, ...], kind: int, fresh: bool) -> _Step:
        """Return a character's effect on threads at these nodes; kind: bits of the sources that
        match it; fresh: whether a match may begin with it.
        """
        key = state, kind, fresh
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= MAX_KNOWN:
                self._steps.clear()
            step = self._steps[key] = self._compute(state, kind, fresh)
        return step

    def _compute(self, state: tuple[int, ...], kind: int, fresh: bool) -> _Step:
        program, seen = self.program, set[int]()
        nodes: list[int] = []
        moves: list[_Move] = []
        threads: list[tuple[int, int, tuple[int, ...]]] = [
            (parent, node, ()) for parent, node in enumerate(state)
        ]
        if fresh:
            threads += [(-1, node, slots) for node, slots in program.closure(program.start)]
        for parent, node, begun in threads:
            this = program.nodes[node]
            if this.char is None or not kind >> self.sources.index(this.char.source) & 1:
                continue
            for leaf, slots in program.closure(this.next):
                if leaf in seen:
                    continue
                seen.add(leaf)
                move = parent, (*(-1 - slot for slot in begun), *slots)
                if leaf == 0:  # Threads after it are less preferred.
                    return _Step(tuple(nodes), tuple(moves), move, False)
                nodes.append(leaf)
                moves.append(move)
        stable = tuple(nodes) == state and all(
            parent < 0 or moves[parent] == (parent, ()) for parent, _ in moves
        )
        return _Step(tuple(nodes), tuple(moves), None, stable)


class PatternSet:
    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        self.patterns = patterns
        self.first = re.compile("|".join(p.program.first for p in patterns) or "(?!)")
        """Matches a character that may begin a match."""
        self._classes = [
            [re.compile(source).match for source in pattern.sources] for pattern in patterns
        ]
        self._kinds: dict[str, tuple[int, ...]] = {}
        self._runs: dict[tuple[int, ...], re.Pattern[str]] = {}

    def kinds(self, char: str) -> tuple[int, ...]:
        """Return bits of the sources that match a character, by pattern."""
        kinds = self._kinds.get(char)
        if kinds is None:
            if len(self._kinds) >= MAX_KNOWN:
                self._kinds.clear()
            kinds = self._kinds[char] = tuple(
                sum(1 << at for at, is_one in enumerate(classes) if is_one(char))
                for classes in self._classes
            )
        return kinds

    def run(self, kinds: tuple[int, ...]) -> re.Pattern[str]:
        """Return an expression of a run of characters of the same kinds."""
        run = self._runs.get(kinds)
        if run is None:
            if len(self._runs) >= MAX_KNOWN:
                self._runs.clear()
            tests = {
                f"(?{'=' if kind >> at & 1 else '!'}{source})"
                for pattern, kind in zip(self.patterns, kinds, strict=True)
                for at, source in enumerate(pattern.sources)
            }
            run = self._runs[kinds] = re.compile(rf"(?:{''.join(sorted(tests))}[\s\S])*")
        return run


@lru_cache(maxsize=256)
def pattern_set(*patterns: Pattern) -> PatternSet:
    """Return a cached set, whose knowledge serves all searches."""
    return PatternSet(patterns)


class _Threads:
    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._size = 1 + 2 * len(pattern.program.names)
        self.state: tuple[int, ...] = ()
        self.data: list[_Data] = []
        self.best: tuple[_Data, int] | None = None
        """Best match so far, and its end; remaining threads may improve on it."""

    def step(self, kind: int, position: int, fresh: bool) -> bool:
        """Read a character; fresh: whether a match may begin with it. Return whether repeating it
        changes nothing more.
        """
        step = self._pattern.step(self.state, kind, fresh and self.best is None)
        data = self.data
        if step.matched is not None:
            self.best = self._moved(step.matched, data, position), position + 1
        self.data = [
            data[move[0]] if move[0] >= 0 and not move[1] else self._moved(move, data, position)
            for move in step.moves
        ]
        self.state = step.state
        if self.room(position) <= 0:
            self._drop_long(position)
            return False
        return step.stable

    def room(self, position: int) -> int:
        """Return how many characters may follow before a thread is too long."""
        limit = self._pattern.limit
        if limit is None or not self.data:
            return 1 << 62
        return limit - (position - self.data[0][0])

    def _moved(self, move: _Move, data: list[_Data], position: int) -> _Data:
        parent, slots = move
        changed = [position] + [-1] * (self._size - 1) if parent < 0 else list(data[parent])
        for slot in slots:
            if slot < 0:  # Passed before the character.
                changed[-1 - slot] = position
            else:
                changed[slot] = position + 1
        return tuple(changed)

    def _drop_long(self, position: int) -> None:
        begin = position - (self._pattern.limit or 0)
        left = [at for at, data in enumerate(self.data) if data[0] > begin]
        self.state = tuple(self.state[at] for at in left)
        self.data = [self.data[at] for at in left]


class Search:
    """A search for the first match of several patterns."""

    def __init__(self, patterns: PatternSet, position: int = 0) -> None:
        """position: of the next character in the text."""
        self._patterns = patterns
        self._threads = [_Threads(pattern) for pattern in patterns.patterns]
        self.position = position
        self._found = False

    def read(self, text: str, offset: int) -> Match | None:
        """Read text up to the end of a match, and return it once it is final.

        offset: position of `text`'s first character.
        """
        end = offset + len(text)
        patterns, threads = self._patterns, self._threads
        while self.position < end:
            if not self._found and not any(each.state for each in threads):
                begin = patterns.first.search(text, self.position - offset)
                if begin is None:
                    self.position = end
                    return None
                self.position = offset + begin.start()
            kinds = patterns.kinds(text[self.position - offset])
            if self._step(kinds) and self.position < end:
                run = patterns.run(kinds)
                room = min(each.room(self.position - 1) for each in threads)
                at = self.position - offset
                more = run.match(text, at, min(at + room - 1, len(text))).end() - at  # type: ignore[union-attr]
                if more > 0:
                    self.position += more - 1
                    self._step(kinds)
            if self._found and (match := self._decided()) is not None:
                return match
        return None

    def _step(self, kinds: tuple[int, ...]) -> bool:
        """Read a character; return whether repeating it changes nothing more."""
        fresh, stable = not self._found, True
        for each, kind in zip(self._threads, kinds, strict=True):
            stable = each.step(kind, self.position, fresh) and stable
            self._found = self._found or each.best is not None
        self.position += 1
        return stable and fresh is not self._found

    @property
    def pending(self) -> int:
        """Position from which text may belong to a match; `position` if there is none."""
        begins = [each.data[0][0] for each in self._threads if each.data]
        begins += [each.best[0][0] for each in self._threads if each.best is not None]
        return min(begins, default=self.position)

    @property
    def certain(self) -> int | None:
        """Number of the pattern that will match, though its end may be unknown; None if open."""
        best = self._best()
        if best is None:
            return None
        start = self._start(best)
        for index, each in enumerate(self._threads):
            if any(data[0] < start or (data[0] == start and index != best) for data in each.data):
                return None
        return best

    def finish(self) -> Match | None:
        """End the text; return the match, if any."""
        best = self._best()
        return None if best is None else self._match(best)

    def _start(self, index: int) -> int:
        best = self._threads[index].best
        assert best is not None
        return best[0][0]

    def _best(self) -> int | None:
        best, key = None, (0, 0)
        for index, each in enumerate(self._threads):
            if each.best is not None:
                this = each.best[0][0], each.best[0][0] - each.best[1]
                if best is None or this < key:
                    best, key = index, this
        return best

    def _decided(self) -> Match | None:
        best = self._best()
        if best is None:
            return None
        start = self._start(best)
        if any(data[0] <= start for each in self._threads for data in each.data):
            return None
        return self._match(best)

    def _match(self, index: int) -> Match:
        best = self._threads[index].best
        assert best is not None
        data, end = best
        groups = {
            name: (data[1 + 2 * at], data[2 + 2 * at])
            for at, name in enumerate(self._patterns.patterns[index].program.names)
            if data[1 + 2 * at] >= 0 and data[2 + 2 * at] >= 0
        }
        return Match(index, data[0], end, groups)
