r"""Regular expressions in JSON schemas: the unenforceable, and finite languages.

A grammar reads once from left to right, so it cannot enforce assertions (lookaheads, lookbehinds,
`\b`) or back references.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

ANY_TEXT = r"(?:(?:.|\n)*)"
MAX_COPY = 256
"""Most characters of a group copied for a reference."""
MAX_REPEATED = 64
"""Most listed repetitions."""

_TOKENS = re.compile(
    r"""
      \(\?P=(?P<same>\w+)\) | \(\?\#[^)]*\) | \(\?[a-zA-Z-]+\)
    | (?P<open> \(\?P?<(?P<name>\w+)> | \(\?<?[=!] | \(\?\(\w+\) | \(\?[a-zA-Z-]*: | \(\?> | \( )
    | \\k<(?P<back>\w+)> | \\[1-9][0-9]* | \\.
    | \[\^?(?:\\.|[^\]\\])*\]
    | [*+?][?+]? | \{[0-9]+(?:,[0-9]*)?\}[?+]?
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_QUANTIFIER = re.compile(r"[*+?][?+]?|\{[0-9]+(?:,[0-9]*)?\}[?+]?")
_COUNTS = re.compile(r"\{([0-9]+)(?:,([0-9]+))?\}\??")


@dataclass
class _Group:
    opening: str
    number: int | None = None
    name: str | None = None
    asserts: bool = False
    """Whether it only looks around."""
    parts: list[str] = field(default_factory=list)


def weakened(pattern: str) -> tuple[str, str | None]:
    """Return the pattern without the unenforceable, and the first such part or None.

    Every text with a match of the pattern has one of the result.
    """
    open_groups = [_Group("")]
    copies: dict[str, str] = {}
    """Group's number or name → substitute for references."""
    reason: str | None = None
    num_groups = 0
    dropped = False
    """Whether the last element was dropped, with its quantifier."""
    tokens = list(_TOKENS.finditer(pattern))
    for place, match in enumerate(tokens):
        token, group = match[0], open_groups[-1]
        if _QUANTIFIER.fullmatch(token) and (dropped or not group.parts):
            if not dropped:
                return pattern, None  # Not a regular expression: the backend says so.
            continue
        dropped = False
        if match["open"]:
            group = _Group(token, name=match["name"])
            if token == "(" or group.name is not None:
                num_groups += 1
                group.opening, group.number = "(", num_groups
            elif token[-1] in "=!":
                group.asserts, reason = True, reason or "looks around"
            elif token == "(?>" or token.startswith("(?("):
                # Of a condition, any alternative may count, or none.
                group.opening = "(?:" if token == "(?>" else "(?:|"
                reason = reason or f"has a group {token}"
            open_groups.append(group)
        elif token == ")":
            if len(open_groups) == 1:
                return pattern, None
            open_groups.pop()
            text = f"{group.opening}{''.join(group.parts)})"
            copy = f"(?:{text})?" if len(text) <= MAX_COPY else ANY_TEXT
            if group.number is not None:
                copies[str(group.number)] = copy
            if group.name is not None:
                copies[group.name] = copy
            dropped = group.asserts
            if not dropped:
                open_groups[-1].parts.append(text)
        elif token in (r"\b", r"\B"):
            reason, dropped = reason or f"has a word boundary ({token})", True
        elif token.startswith("(?#"):
            reason, dropped = reason or "has a comment", True
        elif (key := _referred(match)) is not None:
            reason = reason or f"refers back to a group ({token})"
            group.parts.append(copies.get(key, ANY_TEXT))
        elif token in "^$" and not _is_at_edge(tokens, place):
            reason, dropped = reason or f"has {token} in its middle", True
        else:
            group.parts.append(token)
    if len(open_groups) > 1 or reason is None:
        return pattern, None
    return "".join(open_groups[0].parts), reason


def _referred(match: re.Match[str]) -> str | None:
    """Return the group that a reference names, or None."""
    token = match[0]
    if len(token) > 1 and token[0] == "\\" and token[1] in "123456789":
        return token[1:]
    return match["back"] or match["same"]


def _is_at_edge(tokens: list[re.Match[str]], place: int) -> bool:
    """Whether an anchor begins (^) or ends ($) its alternative."""
    if tokens[place][0] == "^":
        before = tokens[place - 1][0] if place else "|"
        return before in ("|", "^") or before.startswith("(")
    after = tokens[place + 1][0] if place + 1 < len(tokens) else "|"
    return after in ("|", ")", "$")


# ---------------------------------------------------------------- finite languages


class _NotListed(Exception):
    """A language is infinite, too large, or written in a way that is not read here."""


def matches_among(pattern: str, names: Collection[str]) -> set[str] | None:
    """Return all texts with a match, if they are among these names.

    None otherwise, or for other syntax than characters, classes, groups, alternatives and bounded
    repetitions between ^ and $.
    """
    longest = max(map(len, names), default=0)
    spelled: set[str] = set()
    try:
        for branch in _branches(pattern):
            if len(branch) < 2 or branch[0] != "^" or branch[-1] != "$":
                return None
            spelled |= _Reader(branch[1:-1], 4 * len(names) + 64, longest).read()
    except _NotListed:
        return None
    return spelled if spelled.issubset(names) else None


def _branches(pattern: str) -> Iterator[list[str]]:
    branch: list[str] = []
    depth = 0
    for match in _TOKENS.finditer(pattern):
        token = match[0]
        depth += bool(match["open"]) - (token == ")")
        if token == "|" and not depth:
            yield branch
            branch = []
        else:
            branch.append(token)
    yield branch


class _Reader:
    def __init__(self, tokens: list[str], limit: int, longest: int) -> None:
        """limit: most texts; longest: characters of one"""
        self._tokens = tokens
        self._limit = limit
        self._longest = longest
        self._place = 0

    def read(self) -> set[str]:
        texts = self._either()
        if self._place < len(self._tokens):
            raise _NotListed
        return texts

    def _either(self) -> set[str]:
        texts = self._sequence()
        while self._next() == "|":
            self._place += 1
            texts |= self._sequence()
        return texts

    def _sequence(self) -> set[str]:
        texts = {""}
        while self._next() not in (None, "|", ")"):
            texts = self._joined(texts, self._repeated(self._element()))
        return texts

    def _element(self) -> set[str]:
        token = self._tokens[self._place]
        self._place += 1
        if token in ("(", "(?:") or re.fullmatch(r"\(\?P?<\w+>", token):
            texts = self._either()
            if self._next() != ")":
                raise _NotListed
            self._place += 1
            return texts
        if token[0] == "[" and len(token) > 1:
            return _members(token[1:-1])
        if token[0] == "\\" or token in (".", "^", "$") or len(token) > 1:
            return _escaped(token)
        return {token}

    def _repeated(self, texts: set[str]) -> set[str]:
        token = self._next()
        if token is None or not _QUANTIFIER.fullmatch(token):
            return texts
        self._place += 1
        if token in ("?", "??"):
            return texts | {""}
        counts = _COUNTS.fullmatch(token)
        if counts is None:
            raise _NotListed
        least, most = int(counts[1]), int(counts[2] or counts[1])
        if token.rstrip("?").endswith(",}") or not least <= most <= MAX_REPEATED:
            raise _NotListed
        spelled: set[str] = set()
        repeated = {""}
        for count in range(most + 1):
            if count >= least:
                spelled |= repeated
            repeated = self._joined(repeated, texts) if count < most else repeated
        return spelled

    def _joined(self, first: set[str], second: set[str]) -> set[str]:
        if len(first) * len(second) > self._limit:
            raise _NotListed
        if max(map(len, first), default=0) + max(map(len, second), default=0) > self._longest:
            raise _NotListed
        return {a + b for a in first for b in second}

    def _next(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None


def _members(inside: str) -> set[str]:
    if inside.startswith("^"):
        raise _NotListed
    characters = [match[0] for match in re.finditer(r"\\.|.", inside, re.DOTALL)]
    texts: set[str] = set()
    place = 0
    while place < len(characters):
        if place + 2 < len(characters) and characters[place + 1] == "-":
            (first,), (last,) = _single(characters[place]), _single(characters[place + 2])
            if not 0 <= ord(last) - ord(first) < 256:
                raise _NotListed
            texts |= {chr(code) for code in range(ord(first), ord(last) + 1)}
            place += 3
        else:
            texts |= _single(characters[place])
            place += 1
    return texts


def _single(character: str) -> set[str]:
    return _escaped(character) if character[0] == "\\" else {character}


def _escaped(token: str) -> set[str]:
    """Return an escaped punctuation."""
    if len(token) == 2 and token[0] == "\\" and not (token[1].isalnum() or token[1] == "_"):
        return {token[1]}
    raise _NotListed
