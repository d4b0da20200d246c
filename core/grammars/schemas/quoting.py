"""Separates quoted text in a grammar, in linear time."""

from __future__ import annotations

import re
from collections.abc import Mapping

REGEX_QUOTES: Mapping[str, str] = {"[": "]"}
LARK_QUOTES: Mapping[str, str] = {'"': '"', "/": "/"}
GBNF_QUOTES: Mapping[str, str] = {'"': '"', "[": "]"}
JSON_QUOTES: Mapping[str, str] = {'"': '"'}
"""Opening → closing mark; a backslash escapes the next character."""

_TOKENS = re.compile(r'\\.|["/\[\]\n]', re.DOTALL)


def split_quoted(
    text: str, quotes: Mapping[str, str], *, lines: bool = False
) -> tuple[str, list[str]]:
    """Return the text with quotes replaced by spaces, and the quotes' contents.

    lines: quotes end with their line.
    """
    outside: list[str] = []
    inside: list[str] = []
    closing: str | None = None
    start = 0
    for match in _TOKENS.finditer(text):
        token = match[0]
        if closing is None:
            if token in quotes:
                outside.append(text[start : match.start()])
                closing, start = quotes[token], match.end()
        elif token == closing or (lines and token == "\n"):
            inside.append(text[start : match.start()])
            outside.append(token if token == "\n" else " ")
            closing, start = None, match.end()
    (outside if closing is None else inside).append(text[start:])
    return "".join(outside), inside
