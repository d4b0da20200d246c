"""Separates quoted text in a grammar from the rest, in time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Mapping

REGEX_QUOTES: Mapping[str, str] = {"[": "]"}
LARK_QUOTES: Mapping[str, str] = {'"': '"', "/": "/"}
GBNF_QUOTES: Mapping[str, str] = {'"': '"', "[": "]"}
JSON_QUOTES: Mapping[str, str] = {'"': '"'}
"""Opening → closing mark. A backslash takes the meaning of what follows it."""

_TOKENS = re.compile(r'\\.|["/\[\]\n]', re.DOTALL)


def split_quoted(
    text: str, quotes: Mapping[str, str], *, lines: bool = False
) -> tuple[str, list[str]]:
    """Return what is outside quotes, a space in the place of each, and what is inside each.

    lines: a quote ends where its line does.
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
