"""Compiles a checkpoint's regular expressions for linear-time search.

Of Python's syntax: literals, escapes, character classes, `.` (newlines too), groups, alternatives
and repetitions, greedy or lazy. Others are refused, as is a `$` that is not an alternative of its
own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

MAX_NODES = 512
"""Most nodes of a program; a count in braces repeats its operand's."""
_MAX_WORK = 8 * MAX_NODES
"""Most parts of a program, including those without nodes."""
_MAX_SOURCE = 2048
_MAX_DEPTH = 20
_CLASSES = "dDsSwW"
_CONTROLS = "abfnrtv"
_COUNT = re.compile(r"\{(\d{1,4})?(,)?(\d{1,4})?\}")
_HEX = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_NAME = re.compile(r"\?P<([A-Za-z_]\w{0,63})>")


class Char(NamedTuple):
    source: str
    """Regular expression of it."""
    literal: str
    """The character, "" for a class."""


class Sequence(NamedTuple):
    parts: list[Part]


class Choice(NamedTuple):
    """Alternatives, the preferred one first."""

    options: list[Part]


class Repeat(NamedTuple):
    """`low` to `high` times (None: any number); lazy: prefer fewer."""

    part: Part
    low: int
    high: int | None
    lazy: bool


class Group(NamedTuple):
    """A named part."""

    name: str
    part: Part


class End(NamedTuple):
    """The end of the text."""


Part = Char | Sequence | Choice | Repeat | Group | End


def literal(text: str) -> Sequence:
    """Return the expression that matches `text` literally."""
    return Sequence([Char(re.escape(char), char) for char in text])


def parse(source: str) -> Part:
    """Parse an expression. Raises ValueError naming unsupported syntax."""
    if len(source) > _MAX_SOURCE:
        raise ValueError(f"a pattern of {len(source)} characters ({_MAX_SOURCE} at most)")
    reader = _Reader(source)
    part = reader.choice(0)
    if reader.at < len(source):
        raise ValueError("an unbalanced )")
    return part


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0

    def choice(self, depth: int) -> Part:
        """Read alternatives, up to a `)` or the end."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"groups nested more than {_MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(options)

    def _sequence(self, depth: int) -> Part:
        parts: list[Part] = []
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(parts)

    def _take(self, text: str) -> bool:
        taken = self.source.startswith(text, self.at)
        self.at += len(text) if taken else 0
        return taken

    def _atom(self, depth: int) -> Part:
        char = self.source[self.at]
        self.at += 1
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char == ".":
            return Char(r"[\s\S]", "")
        if char == "$":
            return End()
        if char in "^*+?":
            raise ValueError(f"{char!r} at character {self.at - 1}")
        return Char(re.escape(char), char)

    def _group(self, depth: int) -> Part:
        name = ""
        if self._take("?:"):
            pass
        elif match := _NAME.match(self.source, self.at):
            name = match[1]
            self.at = match.end()
        elif self.source.startswith("?", self.at):
            what = self.source[self.at - 1 : self.at + 3]
            raise ValueError(f"{what!r}: of groups (…), (?:…) and (?P<name>…) are read")
        part = self.choice(depth + 1)
        if not self._take(")"):
            raise ValueError("an unbalanced (")
        return Group(name, part) if name else part

    def _class(self) -> Char:
        start = self.at - 1
        self._take("^")
        self._take("]")
        while self.at < len(self.source) and self.source[self.at] != "]":
            self.at += 2 if self.source[self.at] == "\\" else 1
        if not self._take("]"):
            raise ValueError("an unbalanced [")
        source = self.source[start : self.at]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "Possible nested set": none are meant.
            try:
                re.compile(source)
            except re.error as error:
                raise ValueError(f"{source!r}: {error}") from None
        return Char(source, "")

    def _escape(self) -> Part:
        rest = self.source[self.at : self.at + 1]
        if rest in ("Z", "z") and rest:
            self.at += 1
            return End()
        if match := _HEX.match(self.source, self.at):
            self.at = match.end()
            char = chr(min(int(match[0][1:], 16), 0x10FFFF))
            return Char(re.escape(char), char)
        self.at += 1
        if rest and rest in _CLASSES:
            return Char(f"\\{rest}", "")
        if rest and rest in _CONTROLS and rest != "b":
            char = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}[rest]
            return Char(re.escape(char), char)
        if not rest or rest.isalnum():
            raise ValueError(f"\\{rest} is not read")
        return Char(re.escape(rest), rest)

    def _repeated(self, part: Part) -> Part:
        low, high = self._count()
        if (low, high) == (1, 1):
            return part
        if isinstance(part, End):
            raise ValueError("a repeated $")
        lazy = self._take("?")
        if self.source[self.at : self.at + 1] in ("*", "+", "?") and self.at < len(self.source):
            raise ValueError(f"{self.source[self.at]!r} after a repetition")
        return Repeat(part, low, high, lazy)

    def _count(self) -> tuple[int, int | None]:
        for mark, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(mark):
                return low, high
        match = _COUNT.match(self.source, self.at)
        if match is None or not (match[1] or match[3]):
            return 1, 1
        self.at = match.end()
        least = int(match[1] or 0)
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if most is not None and most < least:
            raise ValueError(f"{match[0]}: from more to less")
        return least, most


def without_end(part: Part) -> Part | None:
    """Remove alternatives that are the end of the text; None if none remain. Raises ValueError for
    other `$`.
    """
    options = part.options if isinstance(part, Choice) else [part]
    left: list[Part] = [option for option in options if not isinstance(option, End)]
    for inner in left:
        if any(isinstance(each, End) for each in _walk(inner)):
            raise ValueError("'$' is read as an alternative of its own only")
    if not left:
        return None
    return left[0] if len(left) == 1 else Choice(left)


def names(part: Part) -> list[str]:
    return [each.name for each in _walk(part) if isinstance(each, Group)]


def literals(part: Part) -> list[str]:
    """Return its longest literal texts, in order."""
    texts, run = [], ""
    for each in [*_walk(part), Sequence([])]:
        if isinstance(each, Char) and each.literal:
            run += each.literal
        elif run:
            texts.append(run)
            run = ""
    return texts


def _walk(part: Part) -> Iterator[Part]:
    """Yield the expression and its parts in text order. Repetitions and alternatives are preceded
    and followed by their own node.
    """
    yield part
    inner: list[Part] = []
    if isinstance(part, Sequence):
        inner = part.parts
    elif isinstance(part, Choice):
        inner = part.options
    elif isinstance(part, Repeat | Group):
        inner = [part.part]
    for index, each in enumerate(inner):
        if index and isinstance(part, Choice):
            yield Sequence([])
        yield from _walk(each)
    if isinstance(part, Repeat | Choice):
        yield Sequence([])


def _may_be_empty(part: Part) -> bool:
    if isinstance(part, Sequence):
        return all(map(_may_be_empty, part.parts))
    if isinstance(part, Choice):
        return any(map(_may_be_empty, part.options))
    if isinstance(part, Repeat):
        return part.low == 0 or _may_be_empty(part.part)
    return isinstance(part, Group) and _may_be_empty(part.part)


class Node(NamedTuple):
    """A node of a program: a character, a branch, a group's mark, or the match."""

    char: Char | None = None
    branches: tuple[int, ...] = ()
    """The next nodes without a character, by preference."""
    slot: int = -1
    """A group mark's place in a thread's data."""
    next: int = -1
    """The node after the character or mark."""


class Program:
    """The nodes of an expression; node 0 is the match."""

    def __init__(self, part: Part) -> None:
        """Raises ValueError if it is too large, matches only the empty text, or repeats a name."""
        self.nodes: list[Node] = [Node()]
        self._num_added = 0
        self.names = names(part)
        if len(set(self.names)) < len(self.names):
            raise ValueError("a name of a group that occurs twice")
        self.start = self._add(part, 0)
        self.closures: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {}
        if any(node == 0 for node, _ in self.closure(self.start)):
            raise ValueError("it matches no text at all")
        leaves = [self.nodes[node].char for node, _ in self.closure(self.start)]
        self.first = "|".join(leaf.source for leaf in leaves if leaf is not None) or "(?!)"
        """An expression of the characters that may begin a match."""

    def _new(self, node: Node) -> int:
        if len(self.nodes) >= MAX_NODES:
            raise ValueError(f"it is too large: more than {MAX_NODES} nodes")
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _add(self, part: Part, then: int) -> int:
        """Add an expression's nodes before `then`; return the first."""
        self._num_added += 1
        if self._num_added > _MAX_WORK:
            raise ValueError(f"it is too large: more than {_MAX_WORK} parts")
        if isinstance(part, Char):
            return self._new(Node(char=part, next=then))
        if isinstance(part, Sequence):
            for each in reversed(part.parts):
                then = self._add(each, then)
            return then
        if isinstance(part, Choice):
            return self._new(Node(branches=tuple(self._add(each, then) for each in part.options)))
        if isinstance(part, Group):
            slot = 1 + 2 * self.names.index(part.name)
            end = self._new(Node(slot=slot + 1, next=then))
            return self._new(Node(slot=slot, next=self._add(part.part, end)))
        assert isinstance(part, Repeat)
        if part.high is None:
            if _may_be_empty(part.part):
                raise ValueError("it repeats what may be empty")
            loop = self._new(Node())
            body = self._add(part.part, loop)
            self.nodes[loop] = Node(branches=(then, body) if part.lazy else (body, then))
            then = loop
        after = then
        for _ in range((part.high or part.low) - part.low):
            body = self._add(part.part, then)
            then = self._new(Node(branches=(after, body) if part.lazy else (body, after)))
        for _ in range(part.low):
            then = self._add(part.part, then)
        return then

    def closure(self, node: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the nodes reachable without a character, by preference: (character or match, slots
        of group marks on the way).
        """
        if node not in self.closures:
            leaves: list[tuple[int, tuple[int, ...]]] = []
            seen: set[int] = set()
            stack: list[tuple[int, tuple[int, ...]]] = [(node, ())]
            while stack:
                at, slots = stack.pop()
                if at in seen:
                    continue
                seen.add(at)
                this = self.nodes[at]
                if at == 0 or this.char is not None:
                    leaves.append((at, slots))
                elif this.slot >= 0:
                    stack.append((this.next, (*slots, this.slot)))
                else:
                    stack += [(branch, slots) for branch in reversed(this.branches)]
            self.closures[node] = tuple(leaves)
        return self.closures[node]
