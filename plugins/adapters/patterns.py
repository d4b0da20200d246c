"""PEFT's rank and alpha patterns: regular expressions of a stranger, matched in linear time.

A key of `rank_pattern` means the layers whose name is matched by `(.*\\.)?(KEY)$`; the first key
that matches counts (peft/utils/other.py: get_pattern_key). Python's `re` backtracks, without end
for keys made for that; here all ways to match are followed at once, and the steps are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...core.errors import ConfigError, shown

MAX_LENGTH = 512
"""Characters of a pattern."""
MAX_PATTERNS = 4096
MAX_NODES = 4096
"""Nodes of a pattern, its counted repeats written out."""
MAX_REPEAT = 256
MAX_STEPS = 50_000_000
"""Steps of all matches of one adapter; some seconds."""
STEPS_OF_RE = 10
"""What a match by `re` counts for."""
UNBOUNDED = -1
REPEAT = re.compile(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}")
"""A counted repeat; other braces stand for themselves."""

Test = Callable[[str], bool]


@dataclass
class _Node:
    """A state: it takes a character that passes `test`, or none if `holds` is true of its place."""

    test: Test | None = None
    holds: Callable[[str, int], bool] | None = None
    next: list[int] = field(default_factory=list)


class Pattern:
    """A compiled regular expression, without the constructs that need backtracking."""

    def __init__(self, text: str) -> None:
        """Raises ValueError with the reason if the expression is wrong, or cannot be matched in
        linear time."""
        self._nodes: list[_Node] = []
        self._text, self._position, self._depth = text, 0, 0
        begin, end = self._alternatives()
        if self._position < len(text):
            raise ValueError("unbalanced parenthesis")
        self._begin, self._end = begin, end
        self.steps = 0
        """Taken since it was compiled."""

    def matches(self, text: str, *, whole: bool = False) -> bool:
        """Return what `re.match` returns, or with `whole` what `re.fullmatch` does, as truth."""
        states = self._closure({self._begin}, text, 0)
        for place, character in enumerate(text):
            if self._end in states and not whole:
                return True
            taken = set()
            for number in states:
                node = self._nodes[number]
                if node.test is not None and node.test(character):
                    taken.update(node.next)
            if not taken:
                return False
            states = self._closure(taken, text, place + 1)
        return self._end in states

    def _closure(self, states: set[int], text: str, place: int) -> set[int]:
        """Return the states that are reached without a character."""
        reached, waiting = set(states), list(states)
        while waiting:
            node = self._nodes[waiting.pop()]
            if node.test is not None or (node.holds and not node.holds(text, place)):
                continue
            for number in node.next:
                if number not in reached:
                    reached.add(number)
                    waiting.append(number)
        self.steps += len(reached)
        return reached

    # What follows parses; each part is given as its first and last state.

    def _node(self, **fields: object) -> int:
        if len(self._nodes) >= MAX_NODES:
            raise ValueError(f"more than {MAX_NODES} states")
        self._nodes.append(_Node(**fields))  # type: ignore[arg-type]
        return len(self._nodes) - 1

    def _link(self, source: int, target: int) -> None:
        self._nodes[source].next.append(target)

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _next(self) -> str:
        character = self._peek()
        if not character:
            raise ValueError("unexpected end")
        self._position += 1
        return character

    def _taken(self, text: str) -> bool:
        there = self._text.startswith(text, self._position)
        self._position += len(text) * there
        return there

    def _alternatives(self) -> tuple[int, int]:
        parts = [self._sequence()]
        while self._taken("|"):
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        begin, end = self._node(), self._node()
        for first, last in parts:
            self._link(begin, first)
            self._link(last, end)
        return begin, end

    def _sequence(self) -> tuple[int, int]:
        begin = end = self._node()
        while (character := self._peek()) and character not in "|)":
            first, last = self._repeated()
            self._link(end, first)
            end = last
        return begin, end

    def _repeated(self) -> tuple[int, int]:
        start = self._position
        first, last = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return first, last
        least, most = bounds
        if self._nodes[first].holds is not None:
            raise ValueError("nothing to repeat")
        if self._peek() in ("?", "+"):
            if self._next() == "+":
                raise ValueError("a possessive repeat")
        if self._bounds() is not None:
            raise ValueError("a repeat of a repeat")
        after = self._position
        copies = max(least, 1) if most == UNBOUNDED else max(most, 1)
        parts = [(first, last)]
        for _ in range(copies - 1):
            self._position = start
            parts.append(self._atom())
        self._position = after
        begin, end = self._node(), self._node()
        place = begin
        for number, (first, last) in enumerate(parts):
            if number >= least:
                self._link(place, end)
            if most != 0:
                self._link(place, first)
            place = last
        self._link(place, end)
        if most == UNBOUNDED:
            self._link(place, parts[-1][0])
        return begin, end

    def _bounds(self) -> tuple[int, int] | None:
        """Return how often what came before is repeated, at least and at most."""
        for sign, bounds in (("*", (0, UNBOUNDED)), ("+", (1, UNBOUNDED)), ("?", (0, 1))):
            if self._taken(sign):
                return bounds
        repeat = REPEAT.match(self._text, self._position)
        if repeat is None:
            return None
        self._position = repeat.end()
        least = int(repeat[1] or 0)
        most = least if not repeat[2] else int(repeat[3]) if repeat[3] else UNBOUNDED
        if max(least, most) > MAX_REPEAT:
            raise ValueError(f"a repeat of more than {MAX_REPEAT}")
        if UNBOUNDED < most < least:
            raise ValueError("min repeat greater than max repeat")
        return least, most

    def _atom(self) -> tuple[int, int]:
        start = self._position
        character = self._next()
        if character == "(":
            return self._group()
        if character in "*+?" or (character == "{" and REPEAT.match(self._text, start)):
            raise ValueError("nothing to repeat")
        if character == "[":
            test = self._class()
        elif character == ".":
            test = _is_not_newline
        elif character == "^":
            return self._place(lambda text, place: place == 0)
        elif character == "$":
            return self._place(lambda text, place: text[place:] in ("", "\n"))
        elif character == "\\":
            escape = self._next()
            if escape in PLACES:
                return self._place(PLACES[escape])
            test = self._escaped(escape)
        else:
            test = character.__eq__
        begin, end = self._node(test=test), self._node()
        self._link(begin, end)
        return begin, end

    def _place(self, holds: Callable[[str, int], bool]) -> tuple[int, int]:
        begin, end = self._node(holds=holds), self._node()
        self._link(begin, end)
        return begin, end

    def _group(self) -> tuple[int, int]:
        if self._taken("?") and not self._taken(":"):
            raise ValueError("a group of the form (?…)")
        self._depth += 1
        if self._depth > 50:
            raise ValueError("more than 50 groups in each other")
        part = self._alternatives()
        self._depth -= 1
        if not self._taken(")"):
            raise ValueError("missing )")
        return part

    def _escaped(self, escape: str) -> Test:
        """Return the test of an escape, without those that a character has no need of."""
        if (test := CLASSES.get(escape)) is not None:
            return test
        if escape in CONTROLS:
            return CONTROLS[escape].__eq__
        if escape.isascii() and escape.isalnum():
            raise ValueError(f"the escape \\{escape}")
        return escape.__eq__

    def _class(self) -> Test:
        negated, tests = self._taken("^"), list[Test]()
        first = True
        while first or self._peek() != "]":
            first = False
            low, test = self._class_item()
            after = self._text[self._position + 1 : self._position + 2]
            if self._peek() == "-" and after not in ("]", ""):
                self._position += 1
                high, _ = self._class_item()
                if low is None or high is None or low > high:
                    raise ValueError("bad character range")
                tests.append(_between(low, high))
            else:
                tests.append(test)
        self._position += 1
        return lambda character: any(test(character) for test in tests) != negated

    def _class_item(self) -> tuple[str | None, Test]:
        """Return a character of a class and its test; None for what stands for several."""
        character = self._next()
        if character != "\\":
            return character, character.__eq__
        escape = self._next()
        if escape == "b":
            return "\b", "\b".__eq__
        test = self._escaped(escape)
        return None if escape in CLASSES else CONTROLS.get(escape, escape), test


def _is_not_newline(character: str) -> bool:
    return character != "\n"


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_boundary(text: str, place: int) -> bool:
    before = place > 0 and _is_word(text[place - 1])
    return before != (place < len(text) and _is_word(text[place]))


def _not(test: Test) -> Test:
    return lambda character: not test(character)


def _between(low: str, high: str) -> Test:
    return lambda character: low <= character <= high


CLASSES: dict[str, Test] = {
    "d": str.isdecimal, "D": _not(str.isdecimal), "s": str.isspace, "S": _not(str.isspace),
    "w": _is_word, "W": _not(_is_word),
}  # fmt: skip
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
PLACES: dict[str, Callable[[str, int], bool]] = {
    "A": lambda text, place: place == 0,
    "Z": lambda text, place: place == len(text),
    "b": _is_boundary,
    "B": lambda text, place: bool(text) and not _is_boundary(text, place),
}


class Patterns:
    """The keys of a `rank_pattern` or an `alpha_pattern`."""

    def __init__(self, keys: Iterable[str], param: str) -> None:
        """param: the field. Raises ConfigError for a key that cannot be matched."""
        self._param = param
        keys = tuple(keys)
        if len(keys) > MAX_PATTERNS:
            raise ConfigError(
                f"{param}: at most {MAX_PATTERNS} patterns are read, got {len(keys)}", param=param
            )
        self._keys = tuple((key, self._compiled(key)) for key in keys)
        self._pattern_of: dict[str, str | None] = {}
        self._steps = 0

    def key_of(self, name: str) -> str | None:
        """Return the first key that matches a layer's name. Raises ConfigError if all matches
        together take too long."""
        if name not in self._pattern_of:
            self._pattern_of[name] = self._first(name)
        return self._pattern_of[name]

    def _first(self, name: str) -> str | None:
        for key, pattern in self._keys:
            if isinstance(pattern, re.Pattern):
                self._steps += STEPS_OF_RE
                matches = pattern.match(name) is not None
            else:
                before = pattern.steps
                matches = pattern.matches(name)
                self._steps += pattern.steps - before
            if self._steps > MAX_STEPS:
                raise ConfigError(
                    f"{self._param}: its patterns take too long; give the names of layers instead",
                    param=self._param,
                )
            if matches:
                return key
        return None

    def _compiled(self, key: str) -> Pattern | re.Pattern[str]:
        whole = rf"(.*\.)?({key})$"
        reason = ""
        if len(key) > MAX_LENGTH:
            reason = f"it has {len(key)} characters; at most {MAX_LENGTH} are read"
        try:
            if not reason:
                # Nothing is repeated but what PEFT puts before: `re` cannot take long.
                return Pattern(whole) if re.search(r"[*+?{|]", key) else re.compile(whole)
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            reason = str(error)
        raise ConfigError(
            f"{self._param}: the pattern {shown(key)} cannot be matched: {reason}; give the names "
            "of layers instead",
            param=self._param,
        )
