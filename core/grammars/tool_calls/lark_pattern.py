"""Turns a Lark grammar without recursion into a regular expression, which backends can enforce as
the `pattern` of a JSON string, in which most families write arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

MAX_PATTERN = 1 << 16
"""Most characters; each use of a rule is copied."""
MAX_TOTAL = 1 << 20
"""Most characters over all rules."""
MAX_DEPTH = 64
COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+", "CR": r"\r",
    "LF": r"\n", "NEWLINE": r"(\r?\n)+",
}  # fmt: skip
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*)
    |(?P<line>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<arrow>->[ \t]*[A-Za-z_][A-Za-z0-9_]*)
    |(?P<times>~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)?)
    |(?P<directive>%[a-z]+[^\n]*)
    |(?P<range>\.\.)
    |(?P<name>[?!]?_?[A-Za-z][A-Za-z0-9_]*(?:\.-?[0-9]+(?=[ \t]*:))?)
    |(?P<mark>[:|()\[\]?*+])""",
    re.VERBOSE,
)
_IMPORT = re.compile(r"%import\s+common\.([A-Z_]+)(?:\s*->\s*([A-Z_][A-Z0-9_]*))?\s*$")
_IMPORTS = re.compile(r"%import\s+common\s*\(([A-Z_,\s]+)\)\s*$")
_SPECIAL = {c: "\\" + c for c in ".^$*+?{}[]\\|()"} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

Token = tuple[str, str]


def lark_pattern(definition: str) -> str:
    """Return an expression for `start`, without anchors.

    Raises ValueError for recursion, and for inexpressible or too long results.
    """
    if len(definition) > MAX_PATTERN:
        raise ValueError(f"longer than {MAX_PATTERN} characters")
    rules: dict[str, list[Token]] = {}
    patterns: dict[str, str] = {}
    tokens = list(_tokens(definition))
    name = ""
    for place, (kind, text) in enumerate(tokens):
        if kind == "directive":
            _import(text, patterns)
            name = ""
        elif kind == "name" and tokens[place + 1 : place + 2] == [("mark", ":")]:
            name = _bare(text)
            if name in rules:
                raise ValueError(f"{name} is defined twice")
            rules[name] = []
        elif (kind, text) == ("mark", ":") and name and not rules[name]:
            continue
        elif kind != "line":
            if not name:
                raise ValueError(f"{text[:40]!r} belongs to no rule")
            rules[name].append((kind, text))
    return _Expander(rules, patterns).pattern("start", 0)


def _tokens(definition: str) -> Iterator[Token]:
    place = 0
    while place < len(definition):
        match = _TOKEN.match(definition, place)
        if match is None:
            raise ValueError(f"{definition[place : place + 40]!r} cannot be read")
        place = match.end()
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            yield match.lastgroup, match[0]


def _import(text: str, patterns: dict[str, str]) -> None:
    names: list[tuple[str, str]] = []
    if (one := _IMPORT.match(text)) is not None:
        names = [(one[1], one[2] or one[1])]
    elif (many := _IMPORTS.match(text)) is not None:
        names = [(name, name) for name in re.findall("[A-Z_]+", many[1])]
    if not names or any(name not in COMMON for name, _ in names):
        raise ValueError(f"{text[:40]!r} is not supported")
    patterns.update((own, COMMON[name]) for name, own in names)


def _bare(name: str) -> str:
    return name.lstrip("?!").partition(".")[0]


class _Expander:
    def __init__(self, rules: dict[str, list[Token]], patterns: dict[str, str]) -> None:
        self._rules = rules
        self._patterns = patterns
        self._open: set[str] = set()
        self._total = 0

    def pattern(self, name: str, depth: int) -> str:
        if name not in self._patterns:
            if name in self._open:
                raise ValueError(f"{name} refers to itself")
            if name not in self._rules:
                raise ValueError(f"{name} is not defined")
            self._open.add(name)
            self._patterns[name], end = self._either(self._rules[name], 0, depth)
            self._open.discard(name)
            self._total += len(self._patterns[name])
            if self._total > MAX_TOTAL:
                raise ValueError(f"longer than {MAX_TOTAL} characters as expressions")
            if end < len(self._rules[name]):
                raise ValueError(f"{name}: {self._rules[name][end][1][:40]!r} stands alone")
        return self._patterns[name]

    def _either(self, tokens: list[Token], place: int, depth: int) -> tuple[str, int]:
        """Return the alternatives' expression from a place on, and its end."""
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} groups and rules in each other")
        ways: list[str] = []
        parts: list[str] = []
        length = 0
        while place < len(tokens) and tokens[place] not in (("mark", ")"), ("mark", "]")):
            if tokens[place] == ("mark", "|"):
                ways.append("".join(parts))
                parts, place = [], place + 1
                continue
            if tokens[place][0] == "arrow":  # Names a node of the tree that Lark builds.
                place += 1
                continue
            part, place = self._one(tokens, place, depth)
            parts.append(part)
            length += len(part)
            if length > MAX_PATTERN:
                raise ValueError(f"longer than {MAX_PATTERN} characters as an expression")
        ways.append("".join(parts))
        return (ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"), place

    def _one(self, tokens: list[Token], place: int, depth: int) -> tuple[str, int]:
        """Return an element's expression with repetition, and its end."""
        kind, text = tokens[place]
        place += 1
        if kind == "name":
            part = self.pattern(_bare(text), depth + 1)
        elif kind == "string":
            part = _string(text)
        elif kind == "regex":
            part = _regex(text)
        elif text in "([":
            part, place = self._either(tokens, place, depth + 1)
            if tokens[place : place + 1] != [("mark", ")" if text == "(" else "]")]:
                raise ValueError(f"{text!r} is not closed")
            place += 1
            if text == "[":
                part = f"({part})?"
        else:
            raise ValueError(f"{text[:40]!r} is not supported")
        if place < len(tokens):
            kind, text = tokens[place]
            if kind == "mark" and text in "?*+":
                return f"({part}){text}", place + 1
            if kind == "times":
                least, _, most = text[1:].replace(" ", "").partition("..")
                return f"({part}){{{least}{f',{most}' if most else ''}}}", place + 1
        return part, place


def _string(text: str) -> str:
    quoted = text.removesuffix("i") if text.endswith("i") else text
    try:
        value = json.loads(quoted, strict=False)
    except ValueError:
        raise ValueError(f"{text[:40]!r} cannot be read") from None
    pattern = "".join(_SPECIAL.get(char, char) for char in value)
    return f"(?i:{pattern})" if quoted != text else pattern


def _regex(text: str) -> str:
    inner, _, flags = text[1:].rpartition("/")
    flags = "".join(flag for flag in flags if flag in "imsx")
    inner = inner.replace("\\/", "/")
    return f"(?{flags}:{inner})" if flags else f"({inner})"
