"""Arguments of tool calls as JSON objects, for protocols that have no text of them."""

from __future__ import annotations

import json
import re

import msgspec

TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<word>true|false|null)'
    r"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![\d.eE+-])|(?P<mark>[{}\[\],:]))",
    re.S,
)
CLOSERS = {"{": "}", "[": "]"}


def as_object(arguments: str) -> msgspec.Raw:
    """Return a call's arguments as a JSON object: as written, or the complete values if the output
    was cut off. The stream's deltas join to the same.
    """
    for text in (arguments, _complete_part(arguments)):
        data = text.encode("utf-8", "replace")
        try:
            msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            json.loads(data)  # msgspec checks the outermost object alone.
        except (ValueError, RecursionError):
            continue
        return msgspec.Raw(data)
    return msgspec.Raw(b"{}")


def _complete_part(text: str) -> str:
    """Return JSON up to its last complete value, with brackets closed."""
    closers: list[str] = []
    end = position = 0
    before = ""
    while (token := TOKEN.match(text, position)) is not None:
        position = token.end()
        mark = token["mark"]
        if mark in CLOSERS:
            closers.append(CLOSERS[mark])
        elif mark in ("}", "]"):
            if not closers or closers.pop() != mark:
                break
        elif mark is not None or (closers[-1:] == ["}"] and before in ("{", ",")):
            before = mark or ""
            continue  # A comma, a colon, or a key: no value ends here.
        end, before = position, mark or ""
    return text[:end] + "".join(reversed(closers))
